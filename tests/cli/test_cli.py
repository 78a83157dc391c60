"""The command line: flags to configuration, the error boundary, and how little it imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from disagg.cli import app as cli
from disagg.commands.run_options import DEMO_PROMPTS, RunOptions
from disagg.core.config.read import Config, ModelConfig
from disagg.core.errors import BusyError, ConfigError
from transport.keys.file import load_keys

ROOT = Path(__file__).resolve().parents[2]
Calls = list[tuple[str, Config, RunOptions]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Stands in for `disagg.commands.demo`; lists what it was called with."""
    made: Calls = []
    demo = ModuleType("disagg.commands.demo")
    demo.run_demo = lambda config, options: made.append(("demo", config, options))  # type: ignore[attr-defined]
    demo.run_generate = lambda config, options: made.append(("generate", config, options))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "disagg.commands.demo", demo)
    for name in [name for name in __import__("os").environ if name.startswith("DISAGG_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("disagg.cli.run.check_run", lambda config: None)  # the model's folder does not exist
    return made


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    demo = ModuleType("disagg.commands.demo")

    def run_demo(config: Config, options: RunOptions) -> None:
        raise error

    demo.run_demo = run_demo  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "disagg.commands.demo", demo)


def test_demo_needs_no_flags(calls: Calls) -> None:
    assert cli.run(["demo"]) == 0
    [(name, config, options)] = calls
    assert name == "demo"
    assert config == Config()
    assert options.prompts == DEMO_PROMPTS
    assert options.sampling.temperature == 0
    assert options.out_dir is None


def test_demo_flags(calls: Calls, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[transfer]\nlayer_groups = 7\n[prefill]\nmax_requests = 9\n")
    flags = (
        f"demo --model /m --dtype float32 --prefill-tp 4 --decode-tp 3 --device cpu --prompt one --prompt two "
        f"--max-tokens 5 --config {path} --set transfer.layer_groups=2 --set prefill.tp=9 --out {tmp_path} "
        f"--chunk-tokens 64 --prefill-page-size 32 --decode-page-size 8 --ring-bytes 64MiB --transport ucx"
    )
    assert cli.run(flags.split()) == 0
    [(_, config, options)] = calls
    assert (config.model.path, config.model.dtype) == ("/m", "float32")
    assert (config.prefill.tp, config.decode.tp) == (4, 3), "a named flag beats --set"
    assert (config.prefill.device, config.decode.device) == ("cpu", "cpu")
    assert (config.prefill.page_size, config.decode.page_size) == (32, 8)
    assert config.prefill.chunk_tokens == 64
    assert config.prefill.max_requests == 9
    assert config.transfer.ring_bytes == 64 << 20
    assert config.transfer.layer_groups == 2, "--set beats the file"
    assert not config.transport.peer_memory
    assert options.prompts == ("one", "two")
    assert options.sampling.max_tokens == 5
    assert options.out_dir == str(tmp_path)


@pytest.mark.parametrize("command", ["demo", "generate a"])
@pytest.mark.parametrize(
    ("flag", "wanted"), [("", None), ("--deterministic", True), ("--no-deterministic", False)]
)
def test_deterministic(calls: Calls, command: str, flag: str, wanted: bool | None) -> None:
    assert cli.run([*command.split(), *flag.split()]) == 0
    [(name, config, options)] = calls
    assert config.model.deterministic is bool(wanted)
    assert options.deterministic is (wanted if name == "demo" else None)


@pytest.mark.parametrize("requested", [None, True, False])
@pytest.mark.parametrize("configured", [True, False])
@pytest.mark.parametrize("cuda", [True, False])
def test_what_is_compared_is_deterministic_on_a_gpu(
    requested: bool | None, configured: bool, cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from disagg.reference import answers as reference

    device = SimpleNamespace(type="cuda" if cuda else "cpu")
    monkeypatch.setattr(reference, "resolve_device", lambda name: device)
    config = Config(model=ModelConfig(deterministic=configured))
    found = reference.comparable(config, requested).model.deterministic
    assert found is (requested if requested is not None else configured or cuda)


def test_generate_flags(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_DECODE__TP", "4")
    flags = "generate hi --random-init tiny --temperature 0.5 --top-k 9 --top-p 0.8 --seed 3 --stop a"
    assert cli.run([*flags.split(), "--stop", "b c", "--max-tokens", "7"]) == 0
    [(name, config, options)] = calls
    assert name == "generate"
    assert config.model.random_init == "tiny"
    assert config.decode.tp == 4
    sampling = options.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 9, 0.8, 3)
    assert (sampling.stop, sampling.max_tokens) == (("a", "b c"), 7)


BAD_INPUT = [
    ("demo --prefill-tp 0", "flag prefill.tp: prefill.tp = 0 is not allowed; it must be at least 1"),
    ("demo --prefill-tp two", "Invalid value for '--prefill-tp'"),
    ("demo --device gpu", "prefill.device = 'gpu' is not allowed; it must be one of auto, cpu, cuda"),
    ("demo --set prefil.tp=2", "unknown section prefil; did you mean prefill?"),
    ("demo --set prefill.tp", "write section.key=value, e.g. prefill.tp=2"),
    ("demo --config /nowhere.toml", "file /nowhere.toml: cannot be read"),
    ("demo --ring-bytes 3Q", "is not a size"),
    ("demo --max-tokens 0", "max_tokens = 0 is not allowed; it must be at least 1"),
    ("demo --model /a --random-init b", "it must be left out when model.path is given"),
    ("demo --frobnicate", "No such option: --frobnicate"),
    ("generate", "no prompt: give at least one as an argument: disagg generate --model DIR"),
    ("generate hi  ", "prompt 2 is empty"),
    (
        "generate a --temperature -1",
        "temperature = -1.0 is not allowed; it must be 0 (greedy) or more",
    ),
    ("generate a --top-p 0", "top_p = 0.0 is not allowed"),
    ("generate a --top-k -1", "top_k = -1 is not allowed"),
    ("generate a --seed 9223372036854775808", "seed = 9223372036854775808 is not allowed"),
    ("generate a --stop=", "stop = ('',) is not allowed"),
    ("plan --kv-heads 8", "Missing option '--prefill-tp' (see disagg plan --help)"),
    (
        "plan --kv-heads 8 --prefill-tp 1 --decode-tp 1",
        "no model: give --model DIR or --random-init NAME, or --layers",
    ),
    (
        "plan --kv-heads 8 --layers 2 --prefill-tp 1 --decode-tp 1 --gpu-memory-gb 80",
        "--gpu-memory-gb needs a model's weights",
    ),
    ("plan --random-init tiny-llamma --prefill-tp 1 --decode-tp 1", "tiny-llamma"),
    ("plan --kv-heads 0 --layers 1 --prefill-tp 1 --decode-tp 1", "kv_heads = 0 is not allowed"),
    (
        "plan --kv-heads 1 --layers 1 --prefill-tp 1 --decode-tp 1 --dtype int4",
        "dtype = 'int4' is not allowed",
    ),
    (
        "plan --kv-heads 1 --layers 1 --prefill-tp 1 --decode-tp 1 --out a.jpg",
        "--out a.jpg: the picture is a PNG",
    ),
    (
        "plan --kv-heads 1 --layers 1 --prefill-tp 1 --decode-tp 1 --prefill-pp 2",
        "No such option: --prefill-pp",
    ),
    (
        "plan --random-init llama-3.1-8b --prefill-tp 4 --decode-tp 3",
        "decode.tp = 3: LlamaForCausalLM has 32 query heads, which 3 ranks cannot share",
    ),
    (
        "plan --random-init llama-3.1-8b --prefill-tp 4 --decode-tp 2 --layer-groups 0",
        "transfer.layer_groups = 0 is not allowed; it must be at least 1",
    ),
    ("nonsense", "No such command 'nonsense'"),
]


@pytest.mark.parametrize(("flags", "expected"), BAD_INPUT)
def test_bad_input_is_one_line_and_2(
    flags: str, expected: str, calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(flags.split(" ")) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("disagg: ")
    assert expected in captured.err
    assert captured.out == ""
    assert not calls


def test_errors_end_with_their_class_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error, code in ((ConfigError("bad\ninput"), 2), (BusyError("no room"), 1)):
        fail_with(monkeypatch, error)
        assert cli.run(["demo"]) == code
    assert capsys.readouterr().err == "disagg: bad input\ndisagg: no room\n"


def test_interrupt_and_surprise(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    assert cli.run(["demo"]) == 130
    assert "Traceback" not in capsys.readouterr().err
    fail_with(monkeypatch, RuntimeError("a bug"))
    assert cli.run(["demo"]) == 1
    assert "Traceback" in (shown := capsys.readouterr().err)
    assert "RuntimeError: a bug" in shown


def test_a_missing_dependency_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr("importlib.import_module", broken)
    missing = "ray"
    assert cli.run(["demo"]) == 1
    assert "No module named 'ray'" in capsys.readouterr().err
    missing = "disagg.commands.demo"
    assert cli.run(["demo"]) == 1
    assert (
        capsys.readouterr().err
        == "disagg: this installation has no module disagg.commands.demo: reinstall disagg\n"
    )


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 0
    shown = capsys.readouterr().out
    for command in ("demo", "generate", "doctor", "plan", "keys", "version"):
        assert f"\n  {command} " in shown


def test_keys_are_secret_and_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.json"
    assert cli.run(["keys", str(path)]) == 0
    assert path.stat().st_mode & 0o777 == 0o600
    made = load_keys(path)
    assert made.current.server_secret not in capsys.readouterr().out
    assert cli.run(["keys", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert load_keys(path) == made
    assert cli.run(["keys", str(tmp_path / "no" / "keys.json")]) == 2
    assert cli.run(["keys"]) == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["version"]) == 0
    assert capsys.readouterr().out == "disagg 0.1.0\n"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from disagg.cli import app as cli; assert cli.run(['demo', '--help']) == 0; "
        "heavy = ('torch', 'ray', 'transformers', 'ucxx', 'matplotlib', 'triton', 'numpy', 'rich'); "
        "print('heavy:', [name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"
    assert "--prefill-tp" in done.stdout


def test_the_reader_may_leave() -> None:
    command = f"{sys.executable} -m disagg --help | head -c 1"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_demo_prompts_differ_in_length() -> None:
    lengths = [len(prompt) for prompt in DEMO_PROMPTS]
    assert len(lengths) == 6
    assert max(lengths) > 30 * min(lengths)


def test_a_seed_gives_the_demo_other_weights_and_prompts(calls: Calls) -> None:
    for seed in ("1", "2", "1"):
        assert cli.run(["demo", "--seed", seed]) == 0
    first, second, again = (options.prompts for _, _, options in calls)
    assert [config.model.seed for _, config, _ in calls] == [1, 2, 1]
    assert again == first != second
    assert [len(text) for text in first] == [len(text) for text in DEMO_PROMPTS]
    assert [sorted(text.split()) for text in first] == [sorted(text.split()) for text in DEMO_PROMPTS]


def test_output_that_cannot_be_a_folder_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    small = ["--device", "cpu", "--size", "4MiB", "--repeats", "1"]
    assert cli.run(["bench", "kernels", *small, "--out", str(taken)]) == 2
    assert f"cannot make the folder {taken}: File exists; name another one" in capsys.readouterr().err


def test_an_interrupted_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("disagg.cli.tools.print", interrupted, raising=False)
    assert cli.run(["version"]) == 130
    assert capsys.readouterr().err.strip() == "disagg: interrupted"


def test_keys_are_rotated_and_retired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.json"
    assert cli.run(["keys", "--retire", str(path)]) == 2
    assert "cannot read the key file" in capsys.readouterr().err
    assert cli.run(["keys", str(path)]) == 0
    assert cli.run(["keys", "--retire", str(path)]) == 2
    assert "there is none to retire" in capsys.readouterr().err
    assert cli.run(["keys", "--rotate", "--grace-s", "0", str(path)]) == 0
    rotated = load_keys(path)
    said = capsys.readouterr().out
    assert rotated.next is not None
    assert rotated.next.name in said
    assert rotated.next.server_secret not in said
    assert cli.run(["keys", "--retire", str(path)]) == 0
    assert load_keys(path).current == rotated.next
    assert load_keys(path).next is None
    for wrong in (["--rotate", "--retire"], ["--grace-s", "5"], ["--rotate", "--grace-s", "-1"]):
        assert cli.run(["keys", *wrong, str(path)]) == 2
        assert "--rotate" in capsys.readouterr().err


def test_a_command_ends_without_a_last_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch and transformers would be visited: seconds at the end of every command."""
    frozen: list[bool] = []
    monkeypatch.setattr(cli, "run", lambda: 3)
    monkeypatch.setattr("gc.freeze", lambda: frozen.append(True))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, frozen) == (3, [True])
