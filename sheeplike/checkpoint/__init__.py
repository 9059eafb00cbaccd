"""Checkpoints as directories that are whole or absent.

``<root>/step_<policy steps>/`` holds ``<part>.pt`` for each part, files of what is only ever appended to (see
:class:`Journal`), and ``manifest.json`` with every file's size and SHA-256. A directory is written under a temporary
name beside its target (the same file system, whatever ``TMPDIR`` says), flushed to the disk, and only then renamed, so
a kill or a power cut at any moment leaves the last one intact. Reading verifies every byte first: ``torch.load`` alone
does not notice a flipped bit. Nothing is ever unpickled but tensors and plain Python values (``weights_only=True``), so
a checkpoint from elsewhere can run no code.
"""

from sheeplike.checkpoint.directories import best, list_checkpoints
from sheeplike.checkpoint.files import FORMAT, MANIFEST, Corrupt, InUse, UnknownFormat, versions
from sheeplike.checkpoint.journals import CHUNK_BYTES, Journal, Stored
from sheeplike.checkpoint.reading import load, load_latest
from sheeplike.checkpoint.snapshot import NonFinite
from sheeplike.checkpoint.writing import NotWritten, Saved, Writer, save

__all__ = [
    "CHUNK_BYTES",
    "FORMAT",
    "MANIFEST",
    "Corrupt",
    "InUse",
    "Journal",
    "NonFinite",
    "NotWritten",
    "Saved",
    "Stored",
    "UnknownFormat",
    "Writer",
    "best",
    "list_checkpoints",
    "load",
    "load_latest",
    "save",
    "versions",
]
