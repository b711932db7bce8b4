"""A search over all schedules: bounded model checking of the real scheduler and the real block managers.

Random traffic finds what happens often. This search is exhaustive: from an empty pool it takes every sequence of
actions up to a given length, and checks what must hold after each action. The model is replaced by a function of the
tokens (`schedule_world.py`).

    add i             queue a request of `Setting.requests`: a prompt, and the number of its samples
    step              schedule, compute, update; a request for two samples forks in the step of its last prompt token.
                      With overlap, the step after it is scheduled and computed before the update
    fail n            a step fails, and with it the one that was launched ahead; while it is scheduled, unless n is 0
    fork r i          fork sample i of request r between two steps, as a beam search does
    finish r i        end one sample of several, as a stop string does
    abort r           end a request

Equal states are searched once. `World.key` describes a state by what its future depends on: block ids, slots and serial
numbers are replaced by the order in which they occur, and the contents of blocks that nobody needs are left out. The
search is breadth-first, so the first counterexample has the fewest actions. From the deepest states it steps on until
all requests have ended. `record` writes a counterexample as a recording, which `nanovllm view` opens.
"""

import traceback
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from nanovllm_extras.trace.recorder import Recorder
from nanovllm_extras.trace.recording import TraceFile
from tests.extras.schedule_world import MAX_MODEL_LEN, MAX_NUM_SEQS, Action, Setting, World


class Counterexample(Exception):
    """The fewest actions after which something does not hold."""

    def __init__(self, setting: Setting, actions: list[Action], error: BaseException) -> None:
        parts = f"{setting.kind}, budget {setting.budget}, snapshots every {setting.snapshot_interval} blocks"
        lines = [f"{i:3}. {describe_action(setting, action)}" for i, action in enumerate(actions, 1)]
        what = str(error).partition("\n")[0] or traceback.extract_tb(error.__traceback__)[-1].line
        super().__init__("\n".join([parts, *lines, f"{type(error).__name__}: {what}"]))
        self.setting, self.actions = setting, actions


def describe_action(setting: Setting, action: Action) -> str:
    name, *arguments = action
    if name == "add":
        prompt, n = setting.requests[arguments[0]]
        return f"add a request: prompt {list(prompt)}" + f", {n} samples" * (n > 1)
    if name == "abort":
        return f"abort request {arguments[0]}"
    if name == "fail":
        return "a step that fails" + f", in scheduling, after {arguments[0]} events" * (arguments[0] > 0)
    return name if name == "step" else f"{name} sample {arguments[1]} of request {arguments[0]}"


@dataclass
class Searched:
    """How much a search without a counterexample has seen."""

    num_states: int
    num_actions: int
    num_states_at_the_end: int
    """States beyond the depth, on the way from the deepest states to the end of all requests."""


def search(setting: Setting, depth: int) -> Searched:
    """Take all sequences of at most `depth` actions. Raises Counterexample for the shortest one that fails."""
    first = World(setting)
    reached = {first.key(): (None, None)}  # key -> the key before, and the action
    level, num_actions = [(first.key(), first.freeze(), list(first.actions()))], 0
    for _ in range(depth):
        next_level = []
        for key, frozen, actions in level:
            for action in actions:
                num_actions += 1
                world = World.thaw(frozen, setting)
                try:
                    world.apply(action)
                except Exception as error:
                    raise Counterexample(setting, [*path_to(reached, key), action], error) from error
                if (new := world.key()) not in reached:
                    reached[new] = key, action
                    next_level.append((new, world.freeze(), list(world.actions())))
        level = next_level
    ending: set[tuple] = set()
    for key, frozen, _ in level:
        run_to_the_end(World.thaw(frozen, setting), ending, path_to(reached, key))
    return Searched(len(reached), num_actions, len(ending))


def run_to_the_end(world: World, seen: set[tuple], actions: list[Action]) -> None:
    """Step until all requests have ended, or until a state that has been `seen`. Adds the steps to `actions`."""
    while world.seqs:
        actions.append(("step",))
        try:
            world.apply(("step",))
        except Exception as error:
            raise Counterexample(world.setting, actions, error) from error
        key = world.key()
        if key in seen:
            return
        seen.add(key)


def path_to(reached: dict[tuple, tuple], key: tuple) -> list[Action]:
    actions = []
    while True:
        key, action = reached[key]
        if action is None:
            return actions[::-1]
        actions.append(action)


def record(counterexample: Counterexample, path: Path) -> None:
    """Write the run of a counterexample, up to what fails, as a recording."""
    setting = counterexample.setting
    recorder = Recorder()
    world = World(setting, recorder)
    limits = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": setting.budget, "max_model_len": MAX_MODEL_LEN}
    recorder.begin(TraceFile(path), limits | {"description": str(counterexample)})
    with closing(recorder):
        for action in counterexample.actions:
            try:
                world.apply(action)
            except Exception:
                return
            recorder.flush()
