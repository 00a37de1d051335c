"""What can be known before anything starts: options that no process could start with."""

import errno
import socket

from gateway.access.key_file import BadKeyFile, read_key_file
from gateway.config import admin_port_beside, port_clash
from launcher.options import StackOptions
from runtime.bind_address import UnsafeBindError, require_safe_bind
from runtime.settings import resolve_model
from runtime.tls import BadTlsFiles, TlsFiles


class BadOptions(ValueError):
    """Options that no process could start with."""


def check_options(options: StackOptions) -> None:
    """Raises BadOptions, in one line, for what every process would else fail at after seconds of loading."""
    try:
        resolve_model(options.model)
        require_safe_bind(options.host, encrypted=options.tls_cert is not None, insecure=options.insecure)
        if options.api_keys_file is not None:
            read_key_file(options.api_keys_file)
        _check_tls(options)
    except (FileNotFoundError, UnsafeBindError, BadKeyFile, BadTlsFiles) as error:
        raise BadOptions(str(error)) from None
    _check_ports(options)


def _check_tls(options: StackOptions) -> None:
    certificate, key = options.tls_cert, options.tls_key
    if certificate is not None and key is not None:
        TlsFiles(certificate, key, options.tls_client_ca).check()
    elif certificate or key or options.tls_client_ca:
        raise BadOptions("--tls-cert and --tls-key go together, and --tls-client-ca goes with both")


def _check_ports(options: StackOptions) -> None:
    if clash := port_clash(options.grpc_port, options.http_port, options.admin_port):
        raise BadOptions(clash)
    admin_port = admin_port_beside(options.grpc_port, options.admin_port)
    for port in (options.grpc_port, options.http_port, admin_port):
        if _taken(options.host, port):
            raise BadOptions(f"port {port} of {options.host} is taken")


def _taken(host: str, port: int) -> bool:
    """Whether somebody listens there. Our gateway shares its ports with its successor, so that it would
    share them with another system as well, and each would get half the calls.
    """
    if port == 0:
        return False
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
