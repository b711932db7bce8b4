"""What the tests of nanovllm use, for people who write parts of an engine of their own.

`nanovllm test my_file.py` (`command.py`) checks the parts that a file names. In tests of your own, use the same checks:

    from nanovllm_testing.machine import SETTINGS, SchedulerMachine
    from nanovllm_testing.run import Run

    class MyRun(Run):
        def make_scheduler(self, *arguments):
            return MyScheduler(*arguments)

    class MyMachine(SchedulerMachine):
        make_run = MyRun

    TestMyScheduler = MyMachine.TestCase  # pytest and unittest run it
    TestMyScheduler.settings = SETTINGS

The package imports the core only. `machine.py` needs hypothesis, which the extra `testing` installs.
"""
