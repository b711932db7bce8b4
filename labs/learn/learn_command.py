"""Run the command `nanovllm learn`. `learn_options.py` has its options and the text of `--help`."""

import locale
import os
import sys
import webbrowser
from contextlib import suppress

from rich.console import Console

from labs.learn.catalog import find_exercise, list_exercises
from labs.learn.check_process import check_in_process
from labs.learn.exercise import Build, Exercise
from labs.learn.folder import Folder, number_of
from labs.learn.learn_options import make_parser
from labs.learn.predict import Predict
from labs.learn.report_printing import print_list, print_report, print_solution, print_status
from labs.learn.routes import CORE, ROUTES, WEEKEND, Route
from labs.learn.texts import Language, Text
from labs.learn.traffic import Traffic

VIEWS = "views"  # recordings and pages in the learner's folder; each `view` of an exercise replaces the one before


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status: 1 if a check has failed."""
    args = make_parser().parse_args(arguments)
    folder = Folder.find(args.folder)
    try:
        if args.lang:
            folder.write("settings", language=args.lang)
        if args.route:
            folder.write("settings", route=args.route)
        route = ROUTES.get(folder.route_name, WEEKEND)
        language = args.lang or folder.language or guess_language()
        lesson = Lesson(folder, language, Console(highlight=False), route)
        if args.all and args.action == "status":
            return lesson.list()
        if args.action in ("list", "status", "watch"):
            return getattr(lesson, args.action)()
        exercise = find_exercise(args.exercise) if args.exercise else lesson.next_exercise()
        return getattr(lesson, args.action)(exercise)
    except (ValueError, OSError) as error:
        print(f"nanovllm learn: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # Ctrl-C in the middle of a check
        return 130


def guess_language() -> Language:
    """Return the language of the system, if it is one of the exercises' languages."""
    names = [os.environ.get(name, "") for name in ("LC_ALL", "LC_MESSAGES", "LANG")] + [locale.getlocale()[0] or ""]
    chosen = next((name for name in names if name), "")
    return "zh" if chosen.lower().startswith(("zh", "chinese")) else "en"


class Lesson:
    """What the commands do, for one learner."""

    def __init__(self, folder: Folder, language: Language, console: Console, route: Route = WEEKEND) -> None:
        self.folder = folder
        self.route = route
        self.language = language
        self.console = console

    def say(self, text: Text) -> None:
        self.console.print(text.show(self.language), markup=False, soft_wrap=True)

    def next_exercise(self, after: Exercise | None = None) -> Exercise:
        """Return the first exercise that has not been passed, of those `after` another one if there are any.

        The exercises of the route come first, then the core, then all others.
        """
        exercises = list_exercises()
        of_route = {one.name for one in self.route.list_exercises()}
        is_route_done = all(self.folder.has_passed(one) for one in exercises if one.name in of_route)
        is_core_done = all(self.folder.has_passed(one) for one in exercises if one.name in CORE)
        start = number_of(after) if after and (is_core_done or not is_route_done) else 0  # the core from its beginning
        in_order = exercises[start:] + exercises[:start]
        in_order.sort(key=lambda one: (one.name not in of_route, one.name not in CORE))
        return next((one for one in in_order if not self.folder.has_passed(one)), after or in_order[-1])

    def list(self) -> int:
        print_list(self.console, list_exercises(), self.folder, self.language)
        return 0

    def status(self) -> int:
        """Print the exercises of the route, and what is next: "7 of 16, next: share_blocks"."""
        exercises = self.route.list_exercises()
        missing = [one for one in exercises if not self.folder.has_passed(one)]
        begun = [one for one in missing if self.folder.file_of(one).exists()]
        following = next(iter([*begun, *missing]), None)
        print_status(self.console, self.route, following, self.folder, self.language)
        if following is not None:
            self.suggest(following)
        elif (more := self.next_exercise()) and not self.folder.has_passed(more):
            self.suggest(more)
        others = ", ".join(name for name in ROUTES if name != self.route.name)
        others_zh = "、".join(name for name in ROUTES if name != self.route.name)
        self.say(
            Text(
                f"All {len(list_exercises())} exercises: nanovllm learn --all. Other routes: --route {others}.",
                f"全部 {len(list_exercises())} 个练习：nanovllm learn --all。其他路线：--route {others_zh}。",
            )
        )
        self.say(Text("All commands: nanovllm learn --help", "全部命令：nanovllm learn --help"))
        return 0

    def suggest(self, exercise: Exercise) -> None:
        """Say how to begin an exercise, or to check it if it is begun."""
        action = "check" if self.folder.file_of(exercise).exists() else "start"
        command = f"nanovllm learn {action} {number_of(exercise)}"
        title = exercise.title
        if exercise in self.route.list_exercises():
            self.say(Text(f"Next: {command} ({title.en})", f"下一个：{command}（{title.zh}）"))
        else:
            self.say(
                Text(
                    f"Next: {command} ({title.en}), which is not in the route",
                    f"下一个：{command}（{title.zh}），不在这条路线里",
                )
            )

    def start(self, exercise: Exercise) -> int:
        file = self.folder.file_of(exercise)
        is_new = self.folder.start(exercise, self.language)
        if is_new:
            self.say(Text(f"Open {file} and follow the task at its top.", f"打开 {file}，按文件开头的任务去做。"))
        else:
            self.say(Text(f"{file} exists, and was not changed.", f"{file} 已存在，没有改动。"))
        number = number_of(exercise)
        self.say(Text(f"Then: nanovllm learn check {number}", f"然后：nanovllm learn check {number}"))
        return 0

    def check(self, exercise: Exercise) -> int:
        """Check an answer, and return 0 if it is right."""
        file = self.folder.file_of(exercise)
        if not file.exists():
            raise ValueError(f"{file} does not exist; first run: nanovllm learn start {number_of(exercise)}")
        report = check_in_process(exercise.name, file, self.language)
        self.folder.note_check(exercise, report)
        if isinstance(exercise, Predict):
            first, is_revealed = self.folder.first_prediction(exercise), self.folder.has_revealed(exercise)
            exercise.complete(report, first, is_revealed, self.language)
        print_report(self.console, exercise, report, self.language)
        if report.passed and (following := self.next_exercise(exercise)).name != exercise.name:
            self.suggest(following)
        return int(not report.passed)

    def watch(self) -> int:
        """Check the files that change, until Ctrl-C."""
        from watchfiles import watch

        self.folder.path.mkdir(parents=True, exist_ok=True)
        self.say(Text(f"Watching {self.folder.path}. Ctrl-C ends.", f"正在监视 {self.folder.path}。按 Ctrl-C 结束。"))
        with suppress(KeyboardInterrupt):
            for changes in watch(self.folder.path, recursive=False, debounce=200, step=50):
                changed = {os.path.basename(path) for _, path in changes}
                for exercise in list_exercises():
                    file = self.folder.file_of(exercise)
                    if file.name in changed and file.exists():
                        self.check(exercise)
        return 0

    def hint(self, exercise: Exercise) -> int:
        """Print the next hint, or the last one again."""
        number = min(self.folder.count(exercise, "hints") + 1, len(exercise.hints))
        self.folder.write(exercise.name, hints=number)
        self.say(Text(f"Hint {number} of {len(exercise.hints)}", f"提示 {number} / {len(exercise.hints)}"))
        self.say(exercise.hints[number - 1])
        return 0

    def view(self, exercise: Exercise) -> int:
        """Record nanovllm's own run of the requests that failed in the last check, and open the viewer there."""
        viewed = [
            one.name for one in list_exercises() if isinstance(one, Build) and isinstance(one.examples[0], Traffic)
        ]
        if exercise.name not in viewed:
            raise ValueError(
                f"{exercise.name} has no run of requests to show; these exercises have: {', '.join(viewed)}"
            )
        failing = self.folder.failing_run(exercise)
        if failing is None:
            raise ValueError(f"the last check of {exercise.name} found no run that failed; `view` shows such a run")
        from labs.learn.recorded_run import record
        from nanovllm_extras.trace.page import make_page

        views = self.folder.path / VIEWS  # not a temporary folder: the browser reads the page after this command ends
        views.mkdir(exist_ok=True)
        recording = views / f"{exercise.name}.jsonl"
        page = recording.with_suffix(".html").resolve()
        record(failing[0], recording)
        page.write_text(make_page([recording]), encoding="utf-8")
        address = f"{page.as_uri()}#step={failing[1] + 1}&lang={self.language}"
        self.console.print(address, markup=False, soft_wrap=True)
        webbrowser.open(address)
        return 0

    def show(self, exercise: Exercise) -> int:
        self.folder.write(exercise.name, shown="yes")
        print_solution(self.console, exercise)
        return 0

    def reset(self, exercise: Exercise) -> int:
        kept = self.folder.reset(exercise, self.language)
        if kept is not None:
            self.say(Text(f"Your old file is {kept}.", f"你原来的文件现在是 {kept}。"))
        return self.start(exercise) if kept is None else 0
