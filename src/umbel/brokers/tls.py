"""TLS: which certificates a connection trusts and presents, with the same options for every broker.

The options follow the `?` of rediss://, sentinels:// and amqps://, under the names that Celery's users know:

    ssl_ca_certs         a file with the authorities to trust instead of the system's
    ssl_certfile         the certificate to present to a server that asks for one
    ssl_keyfile          its key, if that is in another file
    ssl_cert_reqs        required, or none: trust any server
    ssl_check_hostname   true, or false: the certificate may name another host

The ssl module takes a megabyte, so it is loaded for the first such connection and not before.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from umbel.errors import AccessRefused, BrokerUnavailable

if TYPE_CHECKING:
    import ssl

Options = Mapping[str, str]
TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
_CHOICES = {
    "ssl_cert_reqs": {"required": True, "cert_required": True, "none": False, "cert_none": False},
    "ssl_check_hostname": {"true": True, "1": True, "false": False, "0": False},
}
_FILE_BYTES_MAX = 1_048_576
_CERTIFICATE, _KEY = b"-----BEGIN CERTIFICATE", b"PRIVATE KEY-----"
_NOT_TLS = "the server does not speak TLS on this port; check the port, or use the scheme without its last s"
_NOT_KNOWN = (
    "the server does not accept the certificate in {shown}; use one signed by an authority that it knows"
)
# What OpenSSL calls it, and what to do about it.
_REASONS = {
    "WRONG_VERSION_NUMBER": _NOT_TLS,
    "RECORD_LAYER_FAILURE": _NOT_TLS,
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the server requires a client certificate; set {shown} and its key",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "handshake refused; a client certificate may be required ({shown})",
    "TLSV1_ALERT_UNKNOWN_CA": _NOT_KNOWN,
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": _NOT_KNOWN,
    "SSLV3_ALERT_BAD_CERTIFICATE": _NOT_KNOWN,
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "the certificate in {shown} is not made for clients; use another",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the certificate in {shown} has expired; renew it",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "the certificate in {shown} was revoked; use another",
}
_WRONG_HOST = ("ostname mismatch", "IP address mismatch")
_WRONG_TIME = ("has expired", "not yet valid")


def option_problem(options: Options) -> str:
    """Return why these options cannot be used; "" if they can."""
    for name, choices in _CHOICES.items():
        value = options.get(name)
        if value is not None and value.lower() not in choices:
            return f"{name} is {value!r}: write {' or '.join(list(choices)[::2])}"
    if "ssl_keyfile" in options and "ssl_certfile" not in options:
        return "ssl_keyfile needs a certificate: set ssl_certfile too"
    return ""


def tls_context(options: Options, *, where: str) -> "ssl.SSLContext":
    """Return the TLS context for a connection to `where`; raise AccessRefused if a file cannot be used."""
    import ssl

    try:
        context = ssl.create_default_context(cafile=_checked(options, "ssl_ca_certs", _CERTIFICATE, where))
    except OSError as error:
        raise AccessRefused(f"{_cannot(where, _shown(options, 'ssl_ca_certs'))}: {_why(error)}") from None
    certificate = _checked(options, "ssl_certfile", _CERTIFICATE, where)
    if certificate is not None:
        key = _checked(options, "ssl_keyfile" if "ssl_keyfile" in options else "ssl_certfile", _KEY, where)
        try:
            context.load_cert_chain(certificate, key, password=_no_password)
        except (OSError, ValueError) as error:
            raise _unusable(options, error, where) from None
    if not _chosen(options, "ssl_cert_reqs"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif not _chosen(options, "ssl_check_hostname"):
        context.check_hostname = False
    return context


def tls_refusal(where: str, error: BaseException, options: Options) -> BrokerUnavailable | None:
    """Return the error for a failed TLS handshake, with what to do; None if the failure was not about TLS."""
    shown = _shown(options, "ssl_certfile")
    if isinstance(error, ConnectionResetError | BrokenPipeError) or type(error).__name__ == "SSLEOFError":
        # The server's reason comes too late, or never: in TLS 1.3 we send before it has checked us.
        may = (
            "not accept the certificate in"
            if "ssl_certfile" in options
            else "require a client certificate in"
        )
        return BrokerUnavailable(f"{where}: the server ended the handshake; it may {may} {shown}")
    if not hasattr(error, "library"):  # an ssl.SSLError
        return None
    if problem := str(getattr(error, "verify_message", "")).rstrip("."):
        return AccessRefused(f"{where}: {_distrust(problem, options)}")
    reason = str(getattr(error, "reason", "") or "")
    text = _REASONS.get(reason, f"TLS failed: {reason or error}; check the certificates of both sides")
    return AccessRefused(f"{where}: {text.format(shown=shown)}")


def nothing_to_read(error: BaseException) -> bool:
    """Whether a non-blocking socket has no data: plain sockets and TLS raise different errors for that."""
    return isinstance(error, BlockingIOError) or type(error).__name__ == "SSLWantReadError"


def _distrust(problem: str, options: Options) -> str:
    """Return why the server's certificate is not trusted, and what to do."""
    if any(words in problem for words in _WRONG_HOST):
        return f"{problem}; check the host, or set ssl_check_hostname=false"
    if any(words in problem for words in _WRONG_TIME):
        return f"the server's certificate is of another time ({problem}); renew it there, or check this clock"
    remedy = "set ssl_ca_certs=FILE to its certificate authority"
    if "ssl_ca_certs" in options:
        remedy = f"{_shown(options, 'ssl_ca_certs')} does not know it; {remedy}"
    return f"its certificate is not trusted: {problem}; {remedy}"


def _checked(options: Options, name: str, holds: bytes, where: str) -> str | None:
    """Return the path in an option, if the file is readable and contains the expected PEM block: OpenSSL does
    not tell which file is wrong.
    """
    if (path := options.get(name)) is None:
        return None
    try:
        with open(path, "rb") as file:
            text = file.read(_FILE_BYTES_MAX)
    except (OSError, ValueError) as error:
        why = f"{_why(error)}; check the path and who may read it"
        raise AccessRefused(f"{_cannot(where, f'{name}={path}')}: {why}") from None
    if holds not in text:
        what = "certificate" if holds is _CERTIFICATE else "private key"
        remedy = "name one in PEM form" if holds is _CERTIFICATE else "set ssl_keyfile to its key in PEM form"
        raise AccessRefused(f"{_cannot(where, f'{name}={path}')}: it holds no {what}; {remedy}")
    return path


def _unusable(options: Options, error: Exception, where: str) -> BrokerUnavailable:
    files = ", ".join(_shown(options, name) for name in ("ssl_certfile", "ssl_keyfile") if name in options)
    if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
        # That is so for a moment while both files are renewed, so a retry may succeed.
        return BrokerUnavailable(
            f"{_cannot(where, files)}: the key is that of another certificate; check both"
        )
    return AccessRefused(f"{_cannot(where, files)}: {_why(error)}")


def _cannot(where: str, files: str) -> str:
    return f"cannot connect to {where}: cannot use {files}"


def _why(error: Exception) -> str:
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)


def _shown(options: Options, name: str) -> str:
    return f"{name}={options.get(name, 'FILE')}"


def _chosen(options: Options, name: str) -> bool:
    value = options.get(name)
    return value is None or _CHOICES[name][value.lower()]


def _no_password() -> str:
    """Refuse an encrypted key: OpenSSL would ask for its password on the terminal, and a worker has none."""
    raise ValueError("the key is encrypted; store it without a password")
