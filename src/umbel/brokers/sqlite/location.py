"""Where the database file lies: from an address to a path that can hold a broker.

SQLite's locks and its shared memory work between processes of one machine. On a network file
system they fail silently, and messages are lost or run twice; so such a place is refused before
the file is touched. Containers that share a volume of one machine are fine.
"""

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from umbel.errors import AccessRefused, BadURL

SCHEME = "sqlite"
NETWORK_FILE_SYSTEMS = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb2",
        "smb3",
        "smbfs",
        "afs",
        "ncpfs",
        "coda",
        "ceph",
        "lustre",
        "gfs2",
        "ocfs2",
    }
    | {"glusterfs", "beegfs", "gpfs", "davfs", "9pnet"}
)
NETWORK_FUSE = frozenset(
    {"sshfs", "glusterfs", "ceph", "s3fs", "gcsfuse", "goofys", "rclone", "davfs2", "curlftpfs", "smbnetfs"}
)

_MOUNTS = Path("/proc/self/mountinfo")


def path_from_url(url: str) -> Path:
    """Turn `sqlite:///relative.db` or `sqlite:////absolute.db` into an absolute path."""
    parts = urlsplit(url)
    if parts.scheme != SCHEME:
        raise BadURL(url, "it does not start with sqlite:///")
    if parts.netloc or not parts.path.startswith("/"):
        raise BadURL(url, "write sqlite:///relative/path.db or sqlite:////absolute/path.db")
    if parts.query or parts.fragment:
        raise BadURL(url, "it takes no options after ? or #")
    name = unquote(parts.path[1:])
    if not name or name.endswith("/"):
        raise BadURL(url, "it contains no file name; write sqlite:///path.db")
    if name == ":memory:":
        raise BadURL(url, "a database in memory cannot be shared between processes; name a file")
    if "\0" in name:
        raise BadURL(url, "a file name cannot contain a NUL character")
    return Path(os.path.abspath(name))


def prepare(path: Path) -> None:
    """Make sure that the file can be there, and create it for its owner only.

    Directories are not made: a mistyped path would be a new, empty broker in a place that nobody looks at.
    """
    if not path.parent.is_dir():
        raise AccessRefused(
            f"there is no directory {path.parent} for the database {path.name}; "
            "create it, or correct the address of the broker"
        )
    kind = network_file_system(_MOUNTS.read_text() if _MOUNTS.exists() else "", path.parent.resolve())
    if kind is not None:
        raise AccessRefused(
            f"{path} is on a network file system ({kind}), where SQLite's locks are not reliable; "
            "choose a path on a local disk"
        )
    try:
        # Exclusively, so that no existing file is opened here: closing a second descriptor of
        # the file would drop the locks that SQLite holds for this process.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        if not stat.S_ISREG(path.stat().st_mode):
            raise AccessRefused(f"{path} is not a file; choose another path for the database") from None
    except OSError as error:
        raise AccessRefused(
            f"cannot create the database {path}: {error.strerror}; choose a path that this user may write to"
        ) from None


def network_file_system(mountinfo: str, directory: Path) -> str | None:
    """The type of the network file system that holds the directory; None if it is a local one."""
    best, kind = "", None
    for line in mountinfo.splitlines():
        fields, _, source = line.partition(" - ")
        mount_point = fields.split(" ")[4].encode().decode("unicode_escape")
        # A later mount over the same point hides the earlier one.
        if len(mount_point) >= len(best) and directory.is_relative_to(mount_point):
            best, kind = mount_point, source.split(" ")[0]
    if kind is None:
        return None
    fuse, _, driver = kind.partition(".")
    if kind in NETWORK_FILE_SYSTEMS or (fuse == "fuse" and driver in NETWORK_FUSE):
        return kind
    return None
