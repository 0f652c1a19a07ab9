"""Parts of the package that tests replace, all in one table.

Tests replace a part to make it fail, to hold it up, to count its calls, or to reach a
limit with little data. A change that moves or renames a part changes its row here, and
no test.
"""

import importlib
import threading

SEAMS = {
    "arrays.begin_read": "_arrays.read:_begin",
    "arrays.open_one": "_arrays.read:open_one",
    "arrays.read": "_arrays.read:read",
    "arrays.write": "_arrays.write:write",
    "blockwise.compute": "_arrays.blockwise:_compute",
    "blockwise.read": "_arrays.blockwise:read",
    "bucket.create": "_storage.bucket:Bucket.create",
    "bucket.delete": "_storage.bucket:Bucket.delete",
    "bucket.delete_all": "_storage.bucket:Bucket.delete_all",
    "bucket.exchange": "_storage.bucket:Bucket.exchange",
    "bucket.has": "_storage.bucket:Bucket.has",
    "bucket.keys": "_storage.bucket:Bucket.keys",
    "bucket.part": "_storage.bucket:Bucket.part",
    "bucket.part_bytes": "_storage.bucket:_PART_BYTES",
    "bucket.parts_at_a_time": "_storage.bucket:_PARTS_AT_A_TIME",
    "bucket.read": "_storage.bucket:Bucket.read",
    "bucket.read_into": "_storage.bucket:Bucket.read_into",
    "buffered.seconds_at_exit": "datasets._buffered:_SECONDS_AT_EXIT",
    "chunk_file.map_block": "_zarr.chunk_file:map_block",
    "chunk_file.map_blocks": "_zarr.chunk_file:map_blocks",
    "chunk_file.mapped_from": "_zarr.chunk_file:MAPPED_FROM",
    "chunk_file.read": "_zarr.chunk_file:read",
    "chunk_file.verify_mapped": "_zarr.chunk_file:verify_mapped",
    "chunk_file.write": "_zarr.chunk_file:write",
    "chunks_to_write.has_same_source": "_arrays.chunks_to_write:has_same_source",
    "commit.write_files": "_checkpoint.commit:write_files",
    "commit_marker.commit": "_storage.commit_marker:commit",
    "commit_marker.lock_around": "_storage.commit_marker:_lock_around",
    "commit_marker.withdraw": "_storage.commit_marker:withdraw",
    "commit_marker.write_new": "_storage.commit_marker:write_new",
    "convert.journal": "_convert.convert:Journal",
    "convert.journal_add": "_convert.convert:Journal.add",
    "convert.journal_remove": "_convert.convert:Journal.remove",
    "delete.delete": "_steps.delete:delete",
    "delete.delete_item": "_steps.delete:delete_item",
    "delete.sweep": "_steps.delete:sweep",
    "device_copy.has_room": "_arrays.device_copy:has_room",
    "device_copy.program": "_arrays.device_copy:_program",
    "diff.at_once": "_inspect.diff:_AT_ONCE",
    "diff.piece_bytes": "_inspect.diff:_PIECE_BYTES",
    "disk.exists": "_storage.storage:LOCAL.exists",
    "disk.identity": "_storage.storage:LOCAL.identity",
    "disk.make_directory": "_storage.storage:LOCAL.make_directory",
    "disk.open_file": "_storage.storage:LOCAL.open_file",
    "disk.read": "_storage.storage:LOCAL.read",
    "disk.read_into": "_storage.storage:LOCAL.read_into",
    "disk.read_range": "_storage.storage:LOCAL.read_range",
    "disk.read_small": "_storage.storage:LOCAL.read_small",
    "disk.replace": "_storage.storage:LOCAL.replace",
    "disk.stream": "_storage.storage:LOCAL.stream",
    "disk.sync_tree": "_storage.storage:LOCAL.sync_tree",
    "disk.sync_directory": "_storage.storage:LOCAL.sync_directory",
    "disk.write": "_storage.storage:LOCAL.write",
    "disk.write_parts": "_storage.storage:LOCAL.write_parts",
    "disk_usage.on_disk": "_run.disk_usage:on_disk",
    "encode.encoded_at_once": "_arrays.encode:ENCODED_AT_ONCE",
    "encode.encoded_part": "_arrays.encode:_ENCODED_PART",
    "files.are_unchanged": "_checkpoint.completeness:Files.are_unchanged",
    "files.open_regular_file": "_storage.files:open_regular_file",
    "files.remove_tree": "_storage.files:remove_tree",
    "files.sync_directory": "_storage.files:sync_directory",
    "filesystem.is_local": "_storage.filesystem:is_local",
    "filesystem.kind": "_storage.filesystem:kind",
    "formats.table": "_formats:_FORMATS",
    "gathering.compared_bytes": "_report.gathering:_COMPARED_BYTES",
    "guessed_names.read_answers": "_util.guessed_names:read_answers",
    "heartbeat.silent_secs": "_distributed.heartbeat:SILENT_SECS",
    "json_codec.max_state_bytes": "datasets._json_codec:MAX_STATE_BYTES",
    "json_limits.max_values": "_util.json_limits:MAX_VALUES",
    "kept_state.compared_bytes": "_training.kept_state:_COMPARED_BYTES",
    "kept_state.summed_bytes": "_training.kept_state:_SUMMED_BYTES",
    "leaf_statistics.at_once": "_inspect.leaf_statistics:_AT_ONCE",
    "leaf_statistics.piece_bytes": "_inspect.leaf_statistics:_PIECE_BYTES",
    "leaf_types.by_class": "_state.leaf_types:_by_class",
    "leaf_types.by_name": "_state.leaf_types:_by_name",
    "leases.deletion": "_storage.leases:deletion",
    "leases.expires_secs": "_storage.leases:_EXPIRES_SECS",
    "leases.file_system_time": "_storage.leases:_file_system_time",
    "leases.is_being_deleted": "_storage.leases:is_being_deleted",
    "leases.is_older": "_storage.leases:is_older",
    "leases.is_recent": "_storage.leases:_is_recent",
    "leases.make": "_storage.leases:Lease",
    "leases.readers": "_storage.leases:readers",
    "leases.unexpired": "_storage.leases:unexpired",
    "listing.files_below": "_storage.listing:files_below",
    "local_storage.call_bytes": "_storage.local_storage:_CALL_BYTES",
    "local_storage.stream_bytes": "_storage.local_storage:_STREAM_BYTES",
    "local_storage.synced_at_once": "_storage.local_storage:_SYNCED_AT_ONCE",
    "local_storage.syncing_threads": "_storage.local_storage:_SYNCING_THREADS",
    "local_storage.written_at_once": "_storage.local_storage:_WRITTEN_AT_ONCE",
    "locate.read_stored": "_formats.locate:read_stored",
    "locks.abandoned_secs": "_storage.locks:_ABANDONED_SECS",
    "locks.beat_secs": "_storage.locks:_BEAT_SECS",
    "locks.confirm": "_storage.locks:Lock.confirm",
    "locks.late_secs": "_storage.locks:_LATE_SECS",
    "locks.lock": "_storage.locks:lock",
    "locks.look_secs": "_storage.locks:_LOOK_SECS",
    "locks.machine": "_storage.locks:_machine",
    "locks.seen": "_storage.locks:_seen",
    "locks.started": "_storage.locks:_started",
    "locks.time": "_storage.locks:time",
    "locks.until": "_storage.locks:_until",
    "markers.write": "_steps.markers:_write",
    "modes.follow": "_storage.modes:follow",
    "modes.set_on_file": "_storage.modes:set_on_file",
    "msgpack.max_chunk_bytes": "_formats.msgpack.writer:MAX_CHUNK_BYTES",
    "native_manifest.leaf_row": "_formats.native_manifest:leaf_row",
    "native_manifest.parsed_leaves": "_formats.native_manifest:_PARSED_LEAVES",
    "ocdbt.read_tree": "_zarr.ocdbt:_Tree.read",
    "orbax_json.max_bytes": "_formats.orbax_json:MAX_BYTES",
    "overwrite.is_empty": "_checkpoint.overwrite:_is_empty",
    "paths.resolve": "_storage.paths:resolve",
    "processes.process_count": "_util.processes:process_count",
    "processes.process_index": "_util.processes:process_index",
    "progress.bar": "_util.progress:bar",
    "progress.delay_secs": "_util.progress:_DELAY_SECS",
    "read_files.cast_at_once": "_arrays.read_files:_CAST_AT_ONCE",
    "read_files.small_gap_bytes": "_arrays.read_files:_SMALL_GAP_BYTES",
    "read_plan.part_bytes": "_arrays.read_plan:_PART_BYTES",
    "rename.exchange": "_storage.rename:exchange",
    "rename.exchange_atomically": "_storage.rename:exchange_atomically",
    "rename.publish": "_storage.rename:publish",
    "rename.withdraw": "_storage.rename:withdraw",
    "requests.first_pause_secs": "_storage.store_requests:_FIRST_PAUSE_SECS",
    "requests.longest_pause_secs": "_storage.store_requests:_LONGEST_PAUSE_SECS",
    "requests.own_retries": "_storage.store_requests:_TENSORSTORE_RETRIES",
    "retention.deleting_secs": "_run.retention:_DELETING_SECS",
    "retention.time": "_run.retention:time",
    "safetensors.max_header_bytes": "_formats.safetensors.header:MAX_HEADER_BYTES",
    "run_search.is_run": "_inspect.run_search:is_run",
    "run_index.identify_save": "_run.run_index:identify_save",
    "run_step.is_outdated": "_run.run_index:RunStep.is_outdated",
    "save.write_snapshot": "_checkpoint.save:write_snapshot",
    "settings.recorded_again_after": "_run.settings:_RECORDED_AGAIN_AFTER",
    "store.read_into": "_storage.storage:_OBJECTS.read_into",
    "store.stream": "_storage.storage:_OBJECTS.stream",
    "temporary.claim": "_storage.temporary:claim",
    "temporary.discard": "_storage.temporary:discard",
    "temporary.lock_poll_secs": "_storage.temporary:_LOCK_POLL_SECS",
    "temporary.time": "_storage.temporary:time",
    "temporary.touched_every_secs": "_storage.temporary:_TOUCHED_EVERY_SECS",
    "threads.hold_budget": "_util.threads:Budget.hold",
    "threads.look_secs": "_util.threads:_LOOK_SECS",
    "to_host.is_on_cpu": "_arrays.to_host:_is_on_cpu",
    "to_host.pinned": "_arrays.to_host:_pinned",
    "transaction.copy": "_storage.transaction:Transaction.copy",
    "ui_compare.most_bytes": "_report.ui.compare:_MOST_BYTES",
    "ui_leaves.most_bytes": "_report.ui.leaves:_MOST_BYTES",
    "ui_verifications.most_results": "_report.ui.verifications:_MOST_RESULTS",
    "upload_copies.make": "_run.tiers.upload_copies:make",
    "uploads.start": "_run.tiers.uploads:Uploads.start",
    "verify.check": "_checkpoint.verify:check",
    "verify.decoded_at_once": "_checkpoint.verify:_DECODED_AT_ONCE",
    "verify.piece_bytes": "_checkpoint.verify:_PIECE_BYTES",
    "write_database.file_bytes": "_arrays.write:_FILE_BYTES",
    "write_database.own_file_bytes": "_arrays.write:_OWN_FILE_BYTES",
}
"""The name that tests use -> the module, and the part in it.

Functions, limits, pauses, and the clocks that measure them.
"""


def current(seam):
    """Returns the part that a seam names, as it is now."""
    return getattr(*find(seam))


def replace(monkeypatch, seam, new):
    """Replaces a part until the end of the test.

    Args:
        monkeypatch: The fixture, or a context of it.
        seam: The name of the part in the table.
        new: The function or the value in its place.
    """
    monkeypatch.setattr(*find(seam), new)


def refuse_threads(monkeypatch):
    """No thread can be started until the end of the test."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


def find(seam):
    """Returns the owner of a part, and the part's name in it."""
    module, _, path = SEAMS[seam].partition(":")
    owner = importlib.import_module(f"flaxckpt.{module}")
    *owners, name = path.split(".")
    for each in owners:
        owner = getattr(owner, each)
    return owner, name
