"""The TLS identity of a cluster: one Ed25519 key and one certificate, derived from the CURVE keys.

Every process with the key file derives the same bytes. Both sides of a connection present the certificate and
accept only the certificates of their own generations; there is no other trust anchor.

During a key rotation, two processes may present different generations. The dialler names its generation by SNI. A
listener that has this generation presents it, so neither side receives an unknown certificate. `OutgoingChannel`
handles a listener without the dialler's generation.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import ssl
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from transport.keys.curve import ControlKeys
from transport.keys.ring import KeyRing

_LABEL = b"disagg transport tls identity v1"
_SERIAL = 1
_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_UNTIL = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)
"""End of the certificates' validity. With fixed dates, all processes derive identical certificates, and a wrong clock
rejects no peer."""
_OP_ENABLE_KTLS = getattr(ssl, "OP_ENABLE_KTLS", 1 << 3)
"""OpenSSL's option for kernel TLS, which `ssl` defines from Python 3.12 on. OpenSSL 3 ignores it without kernel
offload."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The TLS identity derived from one generation of keys."""

    certificate: bytes
    """The certificate in DER."""
    pem: bytes = field(repr=False)
    """The private key and the certificate."""

    @property
    def server_name(self) -> str:
        """SNI name of the generation. The name is sent unencrypted, and reveals no more than the certificate."""
        return f"g-{hashlib.sha256(self.certificate).hexdigest()[:32]}"


def derive(keys: ControlKeys) -> Identity:
    """Derives the identity of `keys`: an Ed25519 key from both secrets by HKDF-SHA256, and its self-signed
    certificate."""
    secret = f"{keys.server_secret}{keys.client_secret}".encode()
    seed = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=_LABEL).derive(secret)
    private = Ed25519PrivateKey.from_private_bytes(seed)
    public = private.public_key()
    raw = public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    # Each generation has its own name, by which a verifier with several certificates selects the right one.
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"disagg {raw[:16].hex()}")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .serial_number(_SERIAL)
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .sign(private, None)
    )
    key = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Identity(
        certificate.public_bytes(serialization.Encoding.DER),
        key + certificate.public_bytes(serialization.Encoding.PEM),
    )


class Contexts:
    """TLS contexts for one or more `generations` of keys: all generations are accepted, the first is presented."""

    def __init__(self, generations: Sequence[ControlKeys]) -> None:
        self._generations = tuple(generations)
        identities = [derive(keys) for keys in generations]
        self.presented = identities[0].certificate
        """The certificate that both contexts present by default, in DER."""
        self.server_name = identities[0].server_name
        """SNI name by which a dialler requests a certificate."""
        self.trusted = frozenset(identity.certificate for identity in identities)
        self.client = _context(ssl.PROTOCOL_TLS_CLIENT, identities[0], self.trusted)
        self._servers = {one.server_name: self._make_server(one) for one in identities}
        self.server = self._servers[self.server_name]
        self._certificates = {self._servers[one.server_name]: one.certificate for one in identities}

    def certificate_of(self, context: ssl.SSLContext) -> bytes:
        """Returns the DER certificate that `context`, one of these contexts, presents."""
        return self._certificates.get(context, self.presented)

    def check(self, certificate: bytes | None) -> None:
        """Raises `ssl.SSLError` unless `certificate`, presented by the peer, is one of `trusted`."""
        if certificate not in self.trusted:
            raise ssl.SSLError("the peer's certificate does not belong to this cluster")

    def presenting(self, certificate: bytes) -> Contexts:
        """Returns contexts that present `certificate`, one of `trusted`, and accept the same certificates as these
        contexts."""
        return Contexts(sorted(self._generations, key=lambda keys: derive(keys).certificate != certificate))

    def _make_server(self, identity: Identity) -> ssl.SSLContext:
        server = _context(ssl.PROTOCOL_TLS_SERVER, identity, self.trusted)
        server.num_tickets = 0
        server.sni_callback = self._choose
        return server

    def _choose(self, connection: ssl.SSLObject, server_name: str | None, _: ssl.SSLContext) -> None:
        """Selects the context of the SNI name. Called by OpenSSL; an unknown name keeps the default."""
        chosen = self._servers.get(server_name or "")
        if chosen is not None:
            connection.context = chosen


class Identities:
    """Provides the TLS contexts for the currently valid keys. Any thread may use this object."""

    def __init__(self, ring: KeyRing) -> None:
        self._ring, self._lock = ring, threading.Lock()
        self._generations = ring.generations
        self._contexts = Contexts(self._generations)

    @property
    def contexts(self) -> Contexts:
        """Returns the contexts; the same object while the keys are unchanged."""
        generations = self._ring.generations
        with self._lock:
            if generations != self._generations:
                self._generations, self._contexts = generations, Contexts(generations)
            return self._contexts


def _context(protocol: int, identity: Identity, trusted: Iterable[bytes]) -> ssl.SSLContext:
    """Returns a context that presents `identity` and accepts the certificates `trusted`, DER."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the key identifies a peer; addresses can change
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | _OP_ENABLE_KTLS
    context.load_verify_locations(cadata=b"".join(trusted))
    # `ssl` reads a private key from a file only; this file lives in memory, without a name.
    descriptor = os.memfd_create("disagg-tls", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(identity.pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context
