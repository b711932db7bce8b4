"""`nanovllm learn`: build the parts of an engine yourself, with a checker that explains what is wrong.

    nanovllm learn                    the sixteen core exercises, how far you are, and what is next
    nanovllm learn --all              all exercises, and which you have passed (also: nanovllm learn list)
    nanovllm learn --route afternoon  the exercises of a route: afternoon, weekend (the core) or everything
    nanovllm learn start 1            write the file of an exercise into your folder
    nanovllm learn check 1            check your answer
    nanovllm learn watch              check whenever you save a file
    nanovllm learn hint 1             the next of three hints
    nanovllm learn view 1             the run that failed, step by step in the browser
    nanovllm learn show 1             the solution
    nanovllm learn reset 1            start again; your old file is kept under another name

An exercise has a number and a name; both can be given. The files are in `nanovllm-exercises`, or in `--folder`.
`--lang zh` chooses Chinese. The language and the route are remembered. Nothing is sent anywhere.
"""

import argparse

from labs.learn.texts import LANGUAGES

ROUTES = ("afternoon", "weekend", "everything")  # `routes.py` has them, and imports what `--help` must not need
ACTIONS = ("list", "start", "check", "watch", "hint", "view", "show", "reset", "status")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="nanovllm learn",
        description=(__doc__ or "").split("\n")[0],
        epilog="\n".join((__doc__ or "").split("\n")[2:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=ACTIONS, nargs="?", default="status", help="`status` if you give none")
    parser.add_argument("exercise", nargs="?", help="number or name; without it, the first that you have not passed")
    parser.add_argument("--all", action="store_true", help="list all exercises, not only those of the route")
    parser.add_argument("--route", choices=ROUTES, help="whose exercises to show and to suggest")
    parser.add_argument("--folder", help="where your files are (the current folder if it has some, else a new one)")
    parser.add_argument("--lang", choices=LANGUAGES, help="language of tasks, hints and explanations")
    return parser
