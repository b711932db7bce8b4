"""Parse the values of command-line options that several commands have. `argparse` prints the option before the error.

A shell replaces a variable that is not set by an empty text: `--api-key "$KEY"`. So options refuse empty texts.
"""

import argparse
from urllib.parse import urlsplit

from nanovllm_extras.options.surrogates import is_utf8

MAX_PORT = 65535


def filled(text: str) -> str:
    """Return `text`. Raises ArgumentTypeError if it is empty, or if UTF-8 cannot encode it."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"must not be empty, got {text!r}")
    if not is_utf8(text):
        raise argparse.ArgumentTypeError(f"must be valid UTF-8, got {text!r}")
    return text


def port(text: str) -> int:
    """Parse the number of a port. 0 means any free port."""
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not 0 <= number <= MAX_PORT:
        raise argparse.ArgumentTypeError(f"must be an integer from 0 to {MAX_PORT}, got {text!r}")
    return number


def http_url(text: str) -> str:
    """Return the URL of a server. Raises ArgumentTypeError if it does not begin with http:// or https:// and a host."""
    try:
        parts = urlsplit(filled(text))
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is not a number or too large, or a bad IPv6 address
        is_valid = False
    if not is_valid:
        raise argparse.ArgumentTypeError(f"must be a URL such as http://127.0.0.1:8000, got {text!r}")
    return text
