"""A certificate authority for tests, and folders as programs take them by --internal-tls."""

from __future__ import annotations

from pathlib import Path

import trustme

from diptych.runtime.internal_tls import AUTHORITY, CERTIFICATE, KEY, name_of


class Authority:
    """A CA that writes folders with tls.crt, tls.key and ca.crt."""

    def __init__(self) -> None:
        self.ca = trustme.CA()

    def issue(self, folder: Path, *roles: str) -> Path:
        """Write the files of a program in these roles, in place of those before; return the folder."""
        folder.mkdir(exist_ok=True, parents=True)
        leaf = self.ca.issue_cert(*map(name_of, roles))
        (folder / KEY).touch(0o600)
        leaf.private_key_pem.write_to_path(folder / KEY)
        (folder / CERTIFICATE).write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        self.ca.cert_pem.write_to_path(folder / AUTHORITY)
        return folder

    def issue_all(self, folder: Path) -> Path:
        """Write a folder a role; return the one that has them."""
        for role in ("gateway", "prefill", "decode"):
            self.issue(folder / role, role)
        return folder
