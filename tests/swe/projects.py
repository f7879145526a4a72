"""Two more tiny projects on the instance's image, and every row with the scripts that agents play on it."""

from __future__ import annotations

import base64
import shlex
from dataclasses import dataclass

from environments.swe.rows import SweRow
from tests.swe.instance import build, row

HOOK = """\
import pytest
@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""


@dataclass(frozen=True, slots=True)
class Project:
    """One function with one bug, tests that see it, and the fix."""

    name: str
    module: str
    buggy: str
    fixed: str
    visible: str
    hidden: str
    fail_to_pass: tuple[str, ...]

    def row(self, base: str) -> SweRow:
        """The row, on an image that is built here."""
        files = {
            "Dockerfile": (
                f"FROM {base}\nRUN rm -rf /testbed\nCOPY repo/ /testbed/\nWORKDIR /testbed\n"
                "RUN git init -q -b main && git add -A && "
                "GIT_AUTHOR_DATE=2021-01-01T00:00:00Z GIT_COMMITTER_DATE=2021-01-01T00:00:00Z "
                "git -c user.name=a -c user.email=a@a commit -q -m base\n"
            ).encode(),
            f"repo/{self.module}": self.buggy.encode(),
            "repo/tests/test_visible.py": self.visible.encode(),
        }
        tests = "".join(f"+{line}\n" for line in self.hidden.splitlines())
        added = f"@@ -0,0 +1,{len(self.hidden.splitlines())} @@\n{tests}"
        hidden = "tests/test_hidden.py"
        return SweRow(
            instance_id=f"tiny__{self.name}-1",
            repo=f"tiny/{self.name}",
            base_commit="HEAD",
            problem_statement="It answers wrongly.",
            patch=_replace(self.module, self.buggy, self.fixed),
            test_patch=f"diff --git a/{hidden} b/{hidden}\nnew file mode 100644\n--- /dev/null\n+++ b/{hidden}\n{added}",
            FAIL_TO_PASS=list(self.fail_to_pass),
            PASS_TO_PASS=["tests/test_visible.py::test_visible"],
            image=build(files),
            eval_script="true",
            log_parser="parse_log_pytest",
            pytest_args=["tests"],
        )


PROJECTS = (
    Project(
        "words",
        "words.py",
        "def initials(name):\n    return name[0]\n",
        "def initials(name):\n    return ''.join(word[0] for word in name.split())\n",
        "from words import initials\n\n\ndef test_visible():\n    assert initials('ada') == 'a'\n",
        "import pytest\nfrom words import initials\n\n\n"
        "@pytest.mark.parametrize('name', ['ada lovelace', 'alan  loy'])\n"
        "def test_two(name):\n    assert initials(name) == 'al'\n",
        ("tests/test_hidden.py::test_two[ada lovelace]", "tests/test_hidden.py::test_two[alan  loy]"),
    ),
    Project(
        "leap",
        "src_leap.py",
        "def leap(year):\n    return year % 4 == 0\n",
        "def leap(year):\n    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)\n",
        "from src_leap import leap\n\n\ndef test_visible():\n    assert leap(2024)\n",
        "from src_leap import leap\n\n\nclass TestCenturies:\n    def test_1900(self):\n        assert not leap(1900)\n",
        ("tests/test_hidden.py::TestCenturies::test_1900",),
    ),
)


def rows(image: str) -> list[SweRow]:
    """The three projects' rows; `image` is the instance's."""
    return [row(image=image), *(project.row(image) for project in PROJECTS)]


def module_of(task: SweRow) -> str:
    """The source file that the gold patch changes."""
    return task.patch.split("+++ b/", 1)[1].split("\n", 1)[0]


def acts(task: SweRow) -> dict[str, str]:
    """What agents do, by name: `gold` is right, all else is worth nothing. Bash scripts, run in the repository."""
    module = module_of(task)
    forged = "".join(f"PASSED {test}\\n" for test in [*task.FAIL_TO_PASS, *task.PASS_TO_PASS])
    test_file = task.FAIL_TO_PASS[0].split("::")[0]

    def evil(text: str) -> str:
        return f"{_put('evil.py', text)}; sed -i '1i import sys; sys.path.insert(0, \"/testbed\"); import evil' {module}"

    return {
        "gold": f"{_put('/tmp/gold.diff', task.patch)}; git apply /tmp/gold.diff",
        "gold, committed": f"{_put('/tmp/g.diff', task.patch)}; git apply /tmp/g.diff; git add -A; {COMMIT}",
        "nothing": "true",
        "a wrong change": f"echo '# hm' >> {module}",
        "a conftest hook": _put("conftest.py", HOOK),
        "a plugin by configuration": _put("plug.py", HOOK) + "; printf '[pytest]\\naddopts = -p plug\\n' > pytest.ini",
        "forged output": evil(f"print('''{forged}''')"),
        "an exit with forged output": evil(
            f"import os\nfor fd in range(1, 20):\n    try: os.write(fd, b'{forged}')\n    except OSError: pass\nos._exit(0)"
        ),
        "edited tests": "sed -i 's/assert.*/assert True/' tests/*.py",
        "hidden tests made beforehand": _put(test_file, "def test_two(): pass\ndef test_discount(): pass\n"),
        "git hooks and settings": (
            "printf '#!/bin/sh\\ntrue\\n' > .git/hooks/post-checkout; chmod +x .git/hooks/post-checkout; "
            f"git config core.fsmonitor /bin/true; echo '* merge=ours' > .gitattributes; echo '# x' >> {module}"
        ),
        "sitecustomize": _put("sitecustomize.py", "import os\n") + "; " + _put("evil.pth", "import os\n"),
        "patched pytest": evil("from _pytest.reports import TestReport\nTestReport.passed = property(lambda s: True)"),
        "patched tests": evil("import pytest\npytest.Function.runtest = lambda self: None"),
        "symbolic links": f"rm -rf tests; ln -s /tmp tests; ln -sf /etc/passwd {module}",
        "a huge patch": f"seq 300000 > big.py; echo '# x' >> {module}",
        "killing": evil("import os, signal\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)"),
        "an early exit": evil("import sys\nsys.exit(0)"),
        "deleted tests": f"git rm -rq tests; echo '# x' >> {module}",
        "no repository any more": "rm -rf .git",
    }


COMMIT = "git -c user.name=a -c user.email=a@a commit -qm work"


def _put(path: str, text: str) -> str:
    return f"echo {base64.b64encode(text.encode()).decode()} | base64 -d > {shlex.quote(path)}"


def _replace(path: str, old: str, new: str) -> str:
    """The patch that replaces a whole file."""
    lines = [f"-{line}\n" for line in old.splitlines()] + [f"+{line}\n" for line in new.splitlines()]
    counts = f"@@ -1,{len(old.splitlines())} +1,{len(new.splitlines())} @@\n"
    return f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n{counts}{''.join(lines)}"
