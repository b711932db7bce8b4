import torch


def count_padding(lens):
    lens = torch.tensor(lens)
    return int((torch.arange(int(lens.max())) >= lens[:, None]).sum())


def simulate(num_steps, batch_size):
    waiting, used, places = list(num_steps), 0, 0
    rows = []
    while waiting or any(rows):
        if not any(rows):
            rows = [waiting.pop(0) if waiting else 0 for _ in range(batch_size)]
        used += sum(row > 0 for row in rows)
        places += batch_size
        rows = [max(0, row - 1) for row in rows]
    return used, places


def count_wasted_places(num_steps, batch_size):
    used, places = simulate(num_steps, batch_size)
    return places - used


def utilisation(num_steps, batch_size):
    used, places = simulate(num_steps, batch_size)
    return used / places
