"""Datasets for torch loaders, without other imports, so that workers start fast."""

import torch
from torch.utils.data import Dataset, IterableDataset

SIZE = 40


class Numbers(Dataset):
    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        return {"i": i, "square": torch.tensor([i * i])}


class Stream(IterableDataset):
    """A dataset with a state, which torchdata needs to resume fast."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        index, count = (worker.id, worker.num_workers) if worker else (0, 1)
        begin, self.at = self.at, 0
        for i in range(begin, SIZE // count):
            self.at = i + 1
            yield i * count + index
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]
