"""TLS: which certificates a connection trusts and shows, with the same options for every broker.

They stand after the `?` of rediss:// and amqps://, under the names that Celery's users know:

    ssl_ca_certs         a file with the authorities to trust instead of the system's
    ssl_certfile         the certificate to show to a server that asks for one
    ssl_keyfile          its key, where that is in another file
    ssl_cert_reqs        required, or none: trust any server
    ssl_check_hostname   true, or false: the certificate may be another host's

The ssl module is loaded for the first such connection and not before: it is a megabyte.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from umbel.errors import AccessRefused, BrokerUnavailable

if TYPE_CHECKING:
    import ssl

TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
_CHOICES = {
    "ssl_cert_reqs": {"required": True, "cert_required": True, "none": False, "cert_none": False},
    "ssl_check_hostname": {"true": True, "1": True, "false": False, "0": False},
}
_NOT_TLS = "the server does not speak TLS on this port; check the port, or use the scheme without its last s"
# What OpenSSL calls it, and what to do about it.
_REASONS = {
    "WRONG_VERSION_NUMBER": _NOT_TLS,
    "RECORD_LAYER_FAILURE": _NOT_TLS,
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the server requires a client certificate: set ssl_certfile",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "handshake refused; a client certificate may be required (ssl_certfile)",
    "TLSV1_ALERT_UNKNOWN_CA": "the server does not trust the certificate in ssl_certfile",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the server does not accept the certificate in ssl_certfile",
}


def option_problem(options: Mapping[str, str]) -> str:
    """Why these options cannot be used; "" if they can."""
    for name, choices in _CHOICES.items():
        value = options.get(name)
        if value is not None and value.lower() not in choices:
            return f"{name} is {value!r}: write {' or '.join(list(choices)[::2])}"
    if "ssl_keyfile" in options and "ssl_certfile" not in options:
        return "ssl_keyfile needs a certificate: set ssl_certfile too"
    return ""


def tls_context(options: Mapping[str, str], *, where: str) -> "ssl.SSLContext":
    """For a connection to `where`; raises BrokerUnavailable when a file cannot be used."""
    import ssl

    authorities, certificate = options.get("ssl_ca_certs"), options.get("ssl_certfile")
    try:
        context = ssl.create_default_context(cafile=authorities)
    except OSError as error:
        raise _unusable(where, f"ssl_ca_certs={authorities}", error) from None
    if certificate is not None:
        try:
            context.load_cert_chain(certificate, options.get("ssl_keyfile"), password=_no_password)
        except (OSError, ValueError) as error:
            files = f"ssl_certfile={certificate}, ssl_keyfile={options.get('ssl_keyfile', 'the same')}"
            raise _unusable(where, files, error) from None
    if not _chosen(options, "ssl_cert_reqs"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif not _chosen(options, "ssl_check_hostname"):
        context.check_hostname = False
    return context


def tls_refusal(where: str, error: BaseException) -> BrokerUnavailable | None:
    """What went wrong while TLS was begun and what to do; None where it was something else."""
    if isinstance(error, ConnectionResetError | BrokenPipeError) or type(error).__name__ == "SSLEOFError":
        # Its reason comes too late, or never: TLS 1.3 lets us speak before it has looked at us.
        ended = "the server ended the handshake; it may require a client certificate (ssl_certfile)"
        return BrokerUnavailable(f"{where}: {ended}")
    if not hasattr(error, "library"):  # an ssl.SSLError
        return None
    problem = str(getattr(error, "verify_message", "")).rstrip(".")
    if "ostname mismatch" in problem or "IP address mismatch" in problem:
        return AccessRefused(f"{where}: {problem}; check the host, or set ssl_check_hostname=false")
    if problem:
        remedy = "set ssl_ca_certs=FILE to its certificate authority"
        return AccessRefused(f"{where}: its certificate is not trusted: {problem}; {remedy}")
    reason = str(getattr(error, "reason", "") or "")
    return AccessRefused(f"{where}: {_REASONS.get(reason, f'TLS failed: {reason or error}')}")


def _unusable(where: str, files: str, error: Exception) -> BrokerUnavailable:
    why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    return BrokerUnavailable(f"cannot connect to {where}: a file cannot be used ({files}): {why}")


def nothing_to_read(error: BaseException) -> bool:
    """Of a socket that does not wait: plain ones and TLS say so in different words."""
    return isinstance(error, BlockingIOError) or type(error).__name__ == "SSLWantReadError"


def _chosen(options: Mapping[str, str], name: str) -> bool:
    value = options.get(name)
    return value is None or _CHOICES[name][value.lower()]


def _no_password() -> str:
    """OpenSSL would ask for it on the terminal, and a worker has none."""
    raise ValueError("the TLS key (ssl_keyfile) is encrypted; store it without a password")
