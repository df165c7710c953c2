"""The command line: `main` knows the flags, each other file one command. Imports every room and is imported by none.

`session` runs a coroutine to its end, Ctrl-C included; `view` is the only file that draws on the terminal.
"""
