"""Images made on the spot can be unpacked, whatever links the machine's files are."""

from __future__ import annotations

import json
import os
import tarfile

from valve_tools.cluster import image


def layer_of(archive):
    with tarfile.open(archive) as outer:
        index = json.load(outer.extractfile("index.json"))
        manifest = json.load(outer.extractfile("blobs/sha256/" + index["manifests"][0]["digest"].partition(":")[2]))
        layer = outer.extractfile("blobs/sha256/" + manifest["layers"][0]["digest"].partition(":")[2])
        with tarfile.open(fileobj=layer) as inner:
            return {
                entry.name: inner.extractfile(entry).read() if entry.isreg() else entry.linkname for entry in inner
            }, [entry for entry in inner if entry.islnk()]


def test_a_file_with_two_names_is_never_a_link_to_itself(tmp_path):
    """A venv whose files are linked to an installer's cache could not be unpacked: no demo, no node."""
    (tmp_path / "a").mkdir()
    one, other = tmp_path / "a/lib.so", tmp_path / "b.so"
    one.write_bytes(b"bytes")
    os.link(one, other)
    soft = tmp_path / "soft.so"
    soft.symlink_to("b.so")
    names = [one, tmp_path / "a/../a/lib.so", other, soft]

    image.write(tmp_path / "image.tar", "valve.test/x:1", {str(name): name for name in names})

    found, links = layer_of(tmp_path / "image.tar")
    assert links == []
    assert found == {
        str(one).lstrip("/"): b"bytes",
        str(other).lstrip("/"): b"bytes",
        str(soft).lstrip("/"): "b.so",
    }
