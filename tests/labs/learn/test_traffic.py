"""The requests of a failing run: only those that are needed, in words."""

from labs.learn.traffic import Request, Traffic, describe_traffic, drop_requests

TRAFFIC = Traffic(7, 2, 1, (Request((0, 1, 1), 5, arrival=1), Request((2,), 1, n=3), Request((1, 2), 4, arrival=9)))


def test_requests_that_are_not_needed_are_dropped():
    def fails(traffic):
        return sum(len(one.prompt) for one in traffic.requests) >= 3

    assert drop_requests(TRAFFIC, fails).requests == TRAFFIC.requests[:1]
    assert drop_requests(TRAFFIC, lambda traffic: len(traffic.requests) == 3) == TRAFFIC
    assert len(drop_requests(TRAFFIC, lambda _: True).requests) == 1


def test_a_run_in_words():
    lines = describe_traffic(TRAFFIC).en.split("  \n")
    assert lines[0] == "7 blocks of 2 slots; at most 1 token a step."
    assert lines[1] == "A: prompt of 3 tokens [0 1 1], generates 5, arrives before step 2."
    assert lines[2] == "B: prompt of 1 token [2], generates 1 in each of 3 answers."
    assert len(describe_traffic(TRAFFIC).zh.split("  \n")) == len(lines)
