def count_padding(lens):
    longest = sorted(lens)[-1]
    return sum(longest - n for n in lens)


def count_wasted_places(num_steps, batch_size):
    rest = list(num_steps)
    while len(rest) % batch_size:
        rest.append(0)
    wasted = 0
    while rest:
        wasted += count_padding(rest[:batch_size])
        del rest[:batch_size]
    return wasted


def utilisation(num_steps, batch_size):
    wasted = count_wasted_places(num_steps, batch_size)
    return 1 - wasted / (wasted + sum(num_steps))
