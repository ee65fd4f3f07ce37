"""Where the members of an etcd cluster listen, and how gRPC is told."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.errors import ConfigError, Unavailable

__all__ = ["Address", "is_ip", "parse_endpoints", "target_of"]


@dataclass(frozen=True, slots=True)
class Address:
    """Where one member listens."""

    host: str
    port: int
    tls: bool

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoints(endpoints: Sequence[str]) -> tuple[Address, ...]:
    """Read `host:port`, `http://host:port` or `https://host:port`; `ConfigError` names the bad one."""
    if isinstance(endpoints, str) or not endpoints:
        raise ConfigError("etcd endpoints: give a list with at least one host:port")
    addresses = tuple(_parse(endpoint) for endpoint in endpoints)
    if len({address.tls for address in addresses}) > 1:
        raise ConfigError(f"etcd endpoints: http and https are mixed in {', '.join(endpoints)}")
    return addresses


def _parse(endpoint: str) -> Address:
    scheme, separator, rest = endpoint.rpartition("://")
    host, colon, port = rest.rstrip("/").rpartition(":")
    if separator and scheme not in ("http", "https"):
        raise ConfigError(f"etcd endpoint {endpoint!r}: the scheme must be http or https")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ConfigError(f"etcd endpoint {endpoint!r} is not host:port")
    if any(character in bare for character in "/@?# ") or (":" in bare and bare == host):
        raise ConfigError(f"etcd endpoint {endpoint!r} is not host:port")
    return Address(bare, int(port), scheme == "https")


def target_of(addresses: Sequence[Address]) -> str:
    """The gRPC target: every member behind one name, so that round robin can go around a dead one."""
    if len(addresses) == 1 and not is_ip(addresses[0].host):
        return f"dns:///{addresses[0]}"
    found: list[tuple[int, str]] = []
    for address in addresses:
        try:
            infos = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise Unavailable(f"etcd endpoint {address} has no address: {error}") from error
        infos.sort(key=lambda info: info[0] != socket.AF_INET)
        family, ip = infos[0][0], str(infos[0][4][0])
        found.append(
            (family, f"[{ip}]:{address.port}" if family == socket.AF_INET6 else f"{ip}:{address.port}")
        )
    if len({family for family, _ in found}) > 1:
        raise ConfigError(f"etcd endpoints {', '.join(map(str, addresses))}: IPv4 and IPv6 are mixed")
    kind = "ipv6" if found[0][0] == socket.AF_INET6 else "ipv4"
    return f"{kind}:{','.join(text for _, text in found)}"


def is_ip(host: str) -> bool:
    """Whether `host` is an address and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
