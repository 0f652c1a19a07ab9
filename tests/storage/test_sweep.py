"""The sweep of a directory that another process renames meanwhile."""

import contextlib

from flaxckpt._storage import rename, temporary
from tests.helpers import seams


def test_the_last_renames_are_durable_before_a_leftover_is_removed(
    tmp_path, monkeypatch
):
    """After a power cut, the step would have the name of the removed directory."""
    final = tmp_path / "1"
    new = temporary.new_path(final, temporary.WRITING)
    for path, text in ((final, "old"), (new, "new")):
        path.mkdir()
        (path / "data").write_text(text)
    calls = []
    claim, sync, remove = (
        temporary.claim,
        seams.current("files.sync_directory"),
        seams.current("files.remove_tree"),
    )

    @contextlib.contextmanager
    def late_claim(path):
        rename.exchange_atomically(path, final)  # its writer, which is then killed
        calls.append("exchange")
        with claim(path) as is_ours:
            yield is_ours

    seams.replace(monkeypatch, "temporary.claim", late_claim)
    seams.replace(
        monkeypatch,
        "files.sync_directory",
        lambda path: (calls.append("sync"), sync(path)),
    )
    seams.replace(
        monkeypatch,
        "files.remove_tree",
        lambda path: (calls.append("remove"), remove(path)),
    )
    temporary.sweep(tmp_path, lambda name: True)
    assert calls == ["exchange", "sync", "remove"]
    assert (final / "data").read_text() == "new"
