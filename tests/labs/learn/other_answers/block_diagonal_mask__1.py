import torch


def make_mask(chunks):
    lens = [start + num_new for start, num_new in chunks]
    blocks = [torch.ones(length, length, dtype=torch.bool).tril() for length in lens]
    rows = torch.cat([torch.arange(length) >= start for length, (start, _) in zip(lens, chunks, strict=True)])
    return torch.block_diag(*blocks)[rows].bool()
