"""Types of command-line arguments that several commands have."""

import argparse

MAX_PORT = 65535


def port_number(text: str) -> int:
    """A TCP port; 0 lets the system choose. Raises ArgumentTypeError, which argparse prints."""
    if not text.isdecimal() or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is no port (0 to {MAX_PORT})")
    return int(text)
