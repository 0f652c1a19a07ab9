"""torchdata's StatefulDataLoader resumes exactly, in every epoch."""

import numpy as np
import pytest

from flaxckpt import datasets, errors
from flaxckpt.datasets import Buffered
from tests.datasets.test_json_codec import round_trip
from tests.helpers.dataset_runs import assert_resumes

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("torchdata", reason="torchdata is not installed")

from torch.utils.data import DataLoader, RandomSampler  # noqa: E402
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402
from torchdata.stateful_dataloader import sampler as samplers  # noqa: E402

from tests.helpers.torch_data import SIZE, Numbers, Stream  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    # Of the worker processes, which torch forks.
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]

BATCH = 4
PER_EPOCH = SIZE // BATCH


def loader(dataset=Numbers, *, workers=0, **options):
    torch.manual_seed(7)
    return StatefulDataLoader(
        dataset(),
        batch_size=BATCH,
        num_workers=workers,
        multiprocessing_context="spawn" if workers else None,
        **options,
    )


KINDS = {
    "map": lambda: loader(),
    "shuffled": lambda: loader(shuffle=True),
    "iterable": lambda: loader(Stream),
    "buffered": lambda: Buffered(loader(shuffle=True)),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_loader_resumes_exactly_in_every_epoch(tmp_path, make):
    counts = [1, 5, PER_EPOCH - 1, PER_EPOCH, PER_EPOCH + 1, 2 * PER_EPOCH - 1]
    assert_resumes(tmp_path, make, counts, epochs=2, epoch_size=PER_EPOCH)


@pytest.mark.parametrize("dataset", [Numbers, Stream])
def test_loader_with_worker_processes_resumes_exactly(tmp_path, dataset):
    def make():
        return loader(dataset, workers=2)

    assert_resumes(tmp_path, make, [PER_EPOCH + 3], epochs=2, epoch_size=PER_EPOCH)


def test_restores_the_shuffling_order_under_another_seed():
    used = loader(shuffle=True)
    batches = iter(used)
    next(batches)
    torch.manual_seed(8)
    fresh = StatefulDataLoader(Numbers(), batch_size=BATCH, shuffle=True)
    datasets.set_state(fresh, datasets.state_files(used), path="run/1")
    assert [b["i"].tolist() for b in fresh] == [b["i"].tolist() for b in batches]
    assert [b["i"].tolist() for b in fresh] == [b["i"].tolist() for b in used]


def seeded():
    return torch.Generator().manual_seed(7)


def sampled(sampler):
    return loader(sampler=sampler(Numbers(), generator=seeded()))


def test_torchdata_sampler_resumes_exactly(tmp_path, caplog):
    def make():
        return sampled(samplers.RandomSampler)

    counts = [1, PER_EPOCH, PER_EPOCH + 1]
    assert_resumes(tmp_path, make, counts, epochs=3, epoch_size=PER_EPOCH)
    assert "shuffles" not in caplog.text


@pytest.mark.parametrize(
    "make",
    [lambda: loader(shuffle=True, generator=seeded()), lambda: sampled(RandomSampler)],
    ids=["shared generator", "sampler without state"],
)
def test_warns_once_about_order_missing_in_state(make, caplog):
    batches = make()
    for _ in range(2):
        datasets.state_files(batches)
    assert len(caplog.records) == 1
    assert "shuffle=True and without generator=" in caplog.text


def test_buffered_loader_resumes_like_plain_loader(tmp_path):
    used, fresh = loader(), Buffered(loader())
    batches = iter(used)
    for _ in range(3):
        next(batches)
    datasets.set_state(fresh, datasets.state_files(used), path="run/1")
    np.testing.assert_array_equal(next(fresh)["i"], next(batches)["i"])
    fresh.close()


def test_returns_restored_state_before_first_batch():
    used, fresh = loader(shuffle=True), loader(shuffle=True)
    next(iter(used))
    files = datasets.state_files(used)
    datasets.set_state(fresh, files, path="run/1")
    assert datasets.state_files(fresh) == files


def test_restore_rejects_other_number_of_workers():
    used = loader(workers=1)
    next(iter(used))
    files = datasets.state_files(used)
    del used
    fresh = loader()
    with pytest.raises(errors.DatasetStateError, match="workers") as info:
        datasets.set_state(fresh, files, path="run/1")
    assert info.value.__cause__ is not None
    assert len(list(fresh)) == PER_EPOCH


def test_warns_about_restore_into_started_loop(caplog):
    batches = loader()
    files = datasets.state_files(batches)
    loop = iter(batches)
    next(loop)
    datasets.set_state(batches, files, path="run/1")
    assert "call iter() on it again" in caplog.text
    assert next(iter(batches))["i"][0] == 0
    caplog.clear()
    assert len(list(batches)) == PER_EPOCH
    datasets.set_state(batches, files, path="run/1")
    assert not caplog.records


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: DataLoader(Numbers()), "StatefulDataLoader"),
        (lambda: iter(DataLoader(Numbers())), "StatefulDataLoader"),
        (lambda: iter(loader()), "Pass the loader itself"),
    ],
    ids=["DataLoader", "its iterator", "iterator"],
)
def test_error_names_the_stateful_alternative(make, hint):
    with pytest.raises(errors.DatasetStateError, match=hint):
        datasets.state_files(make())


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", "uint8", "bool", "int64", "complex64", "float8_e5m2"],
)
def test_tensors_round_trip_as_tensors(dtype, shape):
    tensor = torch.ones(shape).to(getattr(torch, dtype))
    found = round_trip({"t": [tensor]})["t"][0]
    assert isinstance(found, torch.Tensor)
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    assert found.tolist() == tensor.tolist()


def test_transposed_tensors_with_gradients_round_trip():
    tensor = torch.arange(6.0, requires_grad=True).reshape(2, 3).T
    found = round_trip(tensor)
    assert torch.equal(found, tensor.detach())
    found[0] = 1
