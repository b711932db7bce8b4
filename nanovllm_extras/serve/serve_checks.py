"""Check values of the server's options before the model is loaded. Each error names the option.

Keys are never part of an error, because errors end in logs.
"""

import ipaddress
import re
import ssl
from collections.abc import Collection, Mapping
from typing import Any

from nanovllm_extras.options.surrogates import is_utf8

CONTROL = re.compile(r"[\x00-\x1f\x7f]")
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s?#]+", re.ASCII | re.IGNORECASE)


def check_names(names: Collection[str]) -> None:
    """Raise ValueError if the model has no name, or an empty name."""
    if not names or not all(name.strip() for name in names):
        raise ValueError(f"--served-model-name must have at least one name, and no empty name, got {list(names)}")


def check_api_keys(keys: Collection[str]) -> None:
    """Raise ValueError if a client could not send one of the keys in `Authorization: Bearer KEY`.

    A header has no control characters, and no spaces at its ends. Other characters are compared as UTF-8.
    """
    for number, key in enumerate(keys, 1):
        if not key.strip():
            raise ValueError(f"--api-key must not be empty: key {number} of {len(keys)} is. Is its variable set?")
        if key != key.strip() or CONTROL.search(key) or not is_utf8(key):
            raise ValueError(
                "--api-key must be valid UTF-8 without control characters, and without spaces at its ends: "
                f"key {number} of {len(keys)} is not"
            )


def check_root_path(path: str) -> None:
    """Raise ValueError if `path` is not a valid `--root-path`."""
    if path and (not path.startswith("/") or path.endswith("/") or not path.isascii() or re.search(r"[\s?#]", path)):
        raise ValueError(f"--root-path must begin with / and not end with it, and be printable ASCII, got {path!r}")


def check_proxies(proxies: Collection[str]) -> None:
    """Raise ValueError if one of the proxies is not an address, a network or `*`. It would never match a client."""
    for proxy in proxies:
        try:
            if proxy != "*":
                ipaddress.ip_network(proxy)
        except ValueError as error:
            raise ValueError(f"--forwarded-allow-ips must be addresses, networks or *: {error}") from error


def check_origins(origins: Collection[str]) -> None:
    """Raise ValueError if one of the origins has not the form that browsers send, so that it would never match."""
    for origin in origins:
        if not ORIGIN.fullmatch(origin):
            raise ValueError(f"--allowed-origins must be * or origins such as https://example.com, got {origin!r}")


def check_tls(tls: Mapping[str, Any]) -> None:
    """Raise ValueError if the files of HTTPS cannot be used. tls: the options of uvicorn; empty for plain HTTP."""
    if not tls:
        return
    certificate, key = tls["ssl_certfile"], tls.get("ssl_keyfile")
    check_certificates("ssl-certfile", certificate)
    if "ssl_ca_certs" in tls:
        check_certificates("ssl-ca-certs", tls["ssl_ca_certs"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    option = "--ssl-certfile" if key is None else "--ssl-keyfile"
    try:
        context.load_cert_chain(certificate, key, password=refuse_password)
    except EncryptedKeyError:
        path = certificate if key is None else key
        raise ValueError(f"{option} must have a key without a password, got the encrypted key in {path!r}") from None
    except ssl.SSLError as error:
        if key is None:
            raise ValueError(f"--ssl-keyfile is missing, and --ssl-certfile {certificate!r} has no key") from error
        if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"):
            raise ValueError(f"--ssl-keyfile must be the key of --ssl-certfile {certificate!r}, got {key!r}") from error
        if error.reason in (None, "PEM_LIB", "NO_START_LINE"):
            raise ValueError(f"--ssl-keyfile must be a private key in PEM format, got {key!r}") from error
        raise ValueError(f"--ssl-certfile {certificate!r} and --ssl-keyfile {key!r} cannot be used: {error}") from error
    except OSError as error:
        raise ValueError(f"{option} {key or certificate!r} cannot be read: {error.strerror}") from error


def check_certificates(option: str, path: str) -> None:
    """Raise ValueError if the file has no certificate in PEM format."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except ssl.SSLError as error:
        raise ValueError(f"--{option} must be a file with certificates in PEM format, got {path!r}") from error
    except OSError as error:
        raise ValueError(f"--{option} must be a file that can be read, got {path!r}: {error.strerror}") from error


class EncryptedKeyError(Exception):
    """Raised for a private key that has a password."""


def refuse_password() -> str:
    """Raise EncryptedKeyError. OpenSSL calls this for an encrypted key; otherwise it would ask in the terminal."""
    raise EncryptedKeyError
