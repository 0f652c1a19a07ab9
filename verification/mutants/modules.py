"""The modules that promise, each with the tests that know it and are quick."""

_OUTAGE = "test_outage_does_not_count_as_death_of_lock_holder"
_SIZE = "test_simulation_counts_written_bytes_and_files"
_STATISTICS = "test_each_save_records_statistics_of_its_leaves[zstd-files]"
_ORBAX = "test_manifest_names_item_as_its_own_root"

MODULES: dict[str, tuple[str, ...]] = {
    "_storage/locks.py": (
        "storage/test_locks.py",
        f"storage/test_restarts.py::{_OUTAGE}",
    ),
    "_storage/leases.py": ("storage/test_leases.py", "run/test_watch.py"),
    "_storage/commit_marker.py": ("storage/test_new_checkpoint.py",),
    "_steps/markers.py": ("steps/test_markers.py",),
    "_steps/delete.py": ("steps/test_delete.py", "run/test_deletions.py"),
    "_run/judge.py": ("run/test_deletions.py", "run/test_retention.py"),
    "_run/retention.py": ("run/test_deletions.py", "run/test_retention.py"),
    "policies.py": ("test_policies.py",),
    "_storage/transaction.py": (
        "storage/test_local_storage.py",
        "storage/test_readers.py",
        "checkpoint/test_commit.py",
    ),
    "_storage/temporary.py": ("storage/test_temporary.py",),
    "_storage/rename.py": ("storage/test_local.py",),
    "_storage/local_storage.py": (
        "storage/test_local_storage.py",
        "storage/test_local.py",
    ),
    "_steps/index.py": ("steps/test_index.py",),
    "_checkpoint/commit.py": (
        "checkpoint/test_commit.py",
        "checkpoint/test_cancellation.py",
        f"inspect/test_simulate.py::{_SIZE}",
        f"run/test_sample_log.py::{_STATISTICS}",
        f"integrations/test_orbax.py::{_ORBAX}",
    ),
    "_checkpoint/overwrite.py": ("checkpoint/test_overwrite_checks.py",),
    "_checkpoint/verify.py": (
        "checkpoint/test_verify_findings.py",
        "checkpoint/test_verify.py",
    ),
    "_checkpoint/completeness.py": ("checkpoint/test_completeness.py",),
    "_checkpoint/inventory.py": ("checkpoint/test_completeness.py",),
    "_arrays/read_files.py": (
        "arrays/test_databases.py",
        "arrays/test_read_parts.py",
        "arrays/test_byte_ranges.py",
    ),
    "_arrays/read_plan.py": ("arrays/test_read_parts.py", "arrays/test_byte_ranges.py"),
    "_zarr/chunk_file.py": ("arrays/test_read_parts.py", "arrays/test_read_raw.py"),
}
"""Module below `flaxckpt` -> files of tests below `tests`."""
