"""The driver patch changes exactly one word, and nothing in a tree it does not understand."""

import importlib.util
import sys

import pytest

ENTRY = """
    {{               /*  [{index}] */
#if NVOC_EXPORTED_METHOD_DISABLED_BY_FLAG({word}u)
        /*pFunc=*/      (void (*)(void)) NULL,
#else
        /*pFunc=*/      (void (*)(void)) &{function}_IMPL,
#endif // NVOC_EXPORTED_METHOD_DISABLED_BY_FLAG({word}u)
        /*flags=*/      {word}u,
        /*accessRight=*/0x0u,
        /*methodId=*/   {method}u,
        /*paramSize=*/  sizeof(SOMETHING),
#if NV_PRINTF_STRINGS_ALLOWED
        /*func=*/       "{function}"
#endif
    }},
"""
OURS, NEIGHBOUR = "subdeviceCtrlCmdFifoDisableChannels", "subdeviceCtrlCmdFifoGetPhysicalChannelCount"
BRANCHES = {"550": ("0x810", "0x850"), "570": ("0x108", "0x118"), "595": ("0x10108", "0x10118")}


@pytest.fixture
def patch(repository):
    spec = importlib.util.spec_from_file_location("driver_patch", repository / "patches/driver/driver_patch.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["driver_patch"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path, patch):
    def build(word, neighbour, *, method="0x2080110b", function=OURS):
        path = tmp_path / patch.FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            ENTRY.format(index=1, word=neighbour, function=NEIGHBOUR, method="0x20801108")
            + ENTRY.format(index=2, word=word, function=function, method=method)
        )
        return path

    return build


@pytest.mark.parametrize("branch", BRANCHES)
def test_apply_changes_one_line_and_revert_gives_the_file_back(patch, tree, tmp_path, branch):
    stock, patched = BRANCHES[branch]
    path = tree(stock, patched)
    before = path.read_text()

    assert patch.main(["verify", str(tmp_path)]) == 1
    assert patch.main(["apply", str(tmp_path)]) == 0
    assert patch.main(["verify", str(tmp_path)]) == 0

    changed = [
        pair for pair in zip(before.splitlines(), path.read_text().splitlines(), strict=True) if len({*pair}) > 1
    ]
    assert [(f"        /*flags=*/      {stock}u,", f"        /*flags=*/      {patched}u,")] == changed

    assert patch.main(["revert", str(tmp_path)]) == 0
    assert before == path.read_text()


def test_apply_twice_is_apply_once(patch, tree, tmp_path):
    path = tree(*BRANCHES["595"])
    patch.main(["apply", str(tmp_path)])
    once = path.read_text()

    assert patch.main(["apply", str(tmp_path)]) == 0
    assert once == path.read_text()


@pytest.mark.parametrize(
    ("what", "arguments"),
    [
        ("an unknown word", {"word": "0x10", "neighbour": "0x50"}),
        ("a neighbour with another word", {"word": "0x10108", "neighbour": "0x10008"}),
        ("no such method", {"word": "0x10108", "neighbour": "0x10118", "method": "0x20801999"}),
        ("another function under our id", {"word": "0x10108", "neighbour": "0x10118", "function": "somethingElse"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_tree_it_does_not_understand_stays_untouched(patch, tree, tmp_path, what, arguments):
    path = tree(**arguments)
    before = path.read_text()

    assert patch.main(["apply", str(tmp_path)]) == 2, what
    assert before == path.read_text()


def test_no_tree_is_an_error_and_no_traceback(patch, tmp_path, capsys):
    assert patch.main(["show", str(tmp_path)]) == 2
    assert "driver_patch:" in capsys.readouterr().err
