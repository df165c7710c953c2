"""What people would use instead of meshcee, as processes that meet the same network, model, data and pace."""
