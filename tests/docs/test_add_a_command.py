"""docs/extend/add-a-command.md, carried out."""

from __future__ import annotations

import json
import re

import pytest

from tests.docs.following import ROOT, follow, run_in

PAGE = "add-a-command.md"


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("command")
    follow(PAGE, folder)
    return folder


def traincast(package, *arguments):
    return run_in(package, f"from traincast.app.cli.main import main\nprint('exit', main({list(arguments)!r}))")


def test_the_page_touches_two_files(tmp_path):
    assert follow(PAGE, tmp_path) == ["traincast/app/cli/commands/describe.py", "traincast/app/cli/registry.py"]


def test_the_new_command_answers_as_the_page_prints(package):
    command, result = re.search(
        r"```console\n\$ traincast (.*?)\n(.*?)```",
        (ROOT / "docs/extend" / PAGE).read_text(encoding="utf-8"),
        re.DOTALL,
    ).groups()

    assert traincast(package, *command.split()) == result + "exit 0\n"


def test_the_new_command_has_json_and_options_in_its_mistakes(package):
    document = json.loads(traincast(package, "describe", "resnet50", "--json").replace("exit 0\n", ""))
    assert (document["workload"], document["rebatchable"]) == ("resnet50", True)

    code = (
        "import io, contextlib\nfrom traincast.app.cli.main import main\nheard = io.StringIO()\n"
        "with contextlib.redirect_stderr(heard):\n"
        "    print(main(['describe', 'resnet50', '--seq-len', '4']), end=' ')\nprint(heard.getvalue())"
    )
    assert run_in(package, code) == ("2 traincast: workload 'resnet50' has no sequence length; leave out --seq-len\n\n")


def test_the_new_command_is_completed_and_listed(package):
    assert "describe) words='-h --help --batch-size --seq-len --json --help-all dlrm-default" in traincast(
        package, "completion", "bash"
    )
    assert "describe" in run_in(
        package, "from traincast.app.cli.main import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass"
    )
