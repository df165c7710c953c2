"""placeholder"""
def device_names(shape): raise SystemExit
