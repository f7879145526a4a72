"""A repository whose git knows one commit: the state that the agent begins with, and nothing of the future.

Flows in: a fresh sandbox of a task's image. Flows out: the SHA of the only commit, which the host keeps. Images may hold the
solution in later commits, tags, reflogs, stashes or unreferenced objects. Removing those one by one forgets some, so a new
repository is made beside the old one, receives the objects of one new commit, and takes its place.
"""

from __future__ import annotations

import secrets
import shlex

from environments.swe.rows import SweRow
from harness.protocols import Sandbox

SCRUB_S = 600.0

_ENV = (
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/nonexistent LC_ALL=C TMPDIR=/tmp "
    "GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null GIT_CONFIG_NOSYSTEM=1 GIT_ATTR_NOSYSTEM=1 "
    "GIT_NO_REPLACE_OBJECTS=1 GIT_OPTIONAL_LOCKS=0 GIT_TERMINAL_PROMPT=0"
)

_SCRUB = r"""
set -euo pipefail
cd -- {workdir}
test -d .git || {{ echo "no repository here"; exit 3; }}
new=.git-sao-new
rm -rf "$new" .git/index.lock
old() {{ git --git-dir=.git --work-tree=. -c core.hooksPath=/dev/null "$@"; }}
now() {{ git --git-dir="$new" --work-tree=. "$@"; }}
find . -mindepth 2 -name .git -prune -exec rm -rf {{}} +
old add -A .
export GIT_AUTHOR_NAME=sao GIT_AUTHOR_EMAIL=sao@localhost GIT_AUTHOR_DATE='2020-01-01T00:00:00Z'
export GIT_COMMITTER_NAME=sao GIT_COMMITTER_EMAIL=sao@localhost GIT_COMMITTER_DATE='2020-01-01T00:00:00Z'
commit=$(old commit-tree "$(old write-tree)" -m base)
now init -q --template=
for key in core.autocrlf core.eol core.filemode core.ignorecase core.symlinks; do
    if value=$(old config --local --get "$key"); then now config "$key" "$value"; fi
done
mkdir -p "$new/info"
if test -f .git/info/exclude; then cp .git/info/exclude "$new/info/exclude"; fi
printf '%s\n' "$commit" | old pack-objects -q --revs --stdout | now index-pack --stdin >/dev/null
now symbolic-ref HEAD refs/heads/main
now -c core.logAllRefUpdates=false update-ref refs/heads/main "$commit"
now read-tree "$commit"
now update-index -q --refresh || true
rm -rf .git
mv "$new" .git
"""

# Every line is `fact number`; all but `commits` must be 0.
_PROBE = r"""
set -euo pipefail
cd -- {workdir}
test -d .git || {{ echo "no repository here"; exit 3; }}
g() {{ git --git-dir=.git --work-tree=. -c core.hooksPath=/dev/null "$@"; }}
count() {{ wc -l | tr -d ' '; }}
head=$(g rev-parse --verify 'HEAD^{{commit}}')
here() {{ local n=0; for name in "$@"; do if test -e ".git/$name"; then n=$((n + 1)); fi; done; echo $n; }}
echo "commits $(g rev-list --all --count)"
echo "unreachable $(( $(g cat-file --batch-all-objects --batch-check | count) - $(g rev-list --objects --all | count) ))"
echo "refs $(( $(g for-each-ref | count) - $(g for-each-ref "$(g symbolic-ref -q HEAD || echo refs/heads)" | count) ))"
echo "remotes $(g remote | count)"
echo "reflog $({{ cat /dev/null $(find .git/logs -type f 2>/dev/null); }} | cut -d' ' -f1,2 | tr ' ' '\n' |
    {{ grep -v -e '^0*$' -e "^$head\$" || true; }} | count)"
echo "hooks $(find .git/hooks -type f ! -name '*.sample' 2>/dev/null | count)"
echo "leftovers $(here ORIG_HEAD FETCH_HEAD MERGE_HEAD CHERRY_PICK_HEAD REBASE_HEAD lost-found modules worktrees \
    rebase-merge rebase-apply shallow objects/info/alternates info/grafts refs/stash refs/original)"
echo "nested $(find . -mindepth 2 -name .git -prune | count)"
echo "changes $(g -c core.fsmonitor= status --porcelain | count)"
echo "head $head"
"""


def isolated(script: str) -> str:
    """A command that runs a script in its own bash with a bare environment: no function, alias or variable reaches it."""
    return f"/usr/bin/env -i {_ENV} /bin/bash --noprofile --norc -c {shlex.quote(script)}"


def scrub_script(workdir: str) -> str:
    """Bash that replaces the history by one commit, whose tree is the folder as it is (without what git ignores)."""
    return _SCRUB.format(workdir=shlex.quote(workdir))


async def prepare(sandbox: Sandbox, row: SweRow) -> str:
    """Make the task out of the image, with one commit in git that is just the folder; its SHA. Raises `RuntimeError`.

    An image that was built this way is only checked, which is cheap; otherwise each episode pays for the rewriting.
    """
    await _set_up(sandbox, row)
    head, faults = await probe(sandbox, row.workdir)
    if faults:
        await _must(sandbox, row, scrub_script(row.workdir), "its history cannot be rewritten")
        head, faults = await probe(sandbox, row.workdir)
    if faults:
        raise RuntimeError(f"{row.instance_id}: more than one clean commit is left: {faults}")
    return head


async def _set_up(sandbox: Sandbox, row: SweRow) -> None:
    """The row's own patch, and the removal of what the image hides from the agent."""
    if row.setup_patch.strip():
        path = f"/tmp/sao-{secrets.token_hex(8)}"
        await sandbox.write(path, whole(row.setup_patch))
        script = (
            f"cd -- {shlex.quote(row.workdir)}; git --git-dir=.git --work-tree=. apply --whitespace=nowarn {path}; rm {path}"
        )
        await _must(sandbox, row, f"set -e; {script}", "its setup_patch does not apply")
    if row.hidden:
        await _must(sandbox, row, f"rm -rf -- {shlex.join(row.hidden)}", "its hidden files cannot be removed")


async def _must(sandbox: Sandbox, row: SweRow, script: str, else_say: str) -> None:
    result = await sandbox.exec(isolated(script), timeout_s=SCRUB_S)
    if result.exit_code != 0:
        raise RuntimeError(f"{row.instance_id}: {else_say}: {result.output[-500:]}")


def whole(patch: str) -> bytes:
    """Datasets may have lost the last newline, without which git refuses the last hunk."""
    return (patch if not patch or patch.endswith("\n") else f"{patch}\n").encode()


async def probe(sandbox: Sandbox, workdir: str) -> tuple[str, dict[str, int]]:
    """HEAD, and what a repository of one clean commit would not have. Raises `RuntimeError` if there is no repository."""
    result = await sandbox.exec(isolated(_PROBE.format(workdir=shlex.quote(workdir))), timeout_s=SCRUB_S)
    facts = dict(line.split(" ", 1) for line in result.output.splitlines() if " " in line)
    head = facts.pop("head", "")
    if result.exit_code != 0 or not head:
        raise RuntimeError(f"no git repository with a commit in {workdir}: {result.output[-500:]}")
    numbers = {name: int(number) for name, number in facts.items() if number.lstrip("-").isdigit()}
    numbers["commits"] -= 1
    return head, {name: number for name, number in numbers.items() if number != 0}
