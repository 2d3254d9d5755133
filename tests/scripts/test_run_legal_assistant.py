"""The assistant in the terminal and on its web page, opened in a real browser."""

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from io import StringIO
from pathlib import Path

import pytest
from patience import PATIENCE

from qat_lora.experiments.legal.authorities import Authorities
from qat_lora.experiments.legal.page import page, show, verdicts
from qat_lora.experiments.legal.rules import AUTHORITIES
from qat_lora.experiments.legal.sections import Answer
from qat_lora.run.command_line import parse
from qat_lora.run.files import sha256

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
SAID = (
    "Topic: contract\nDifficulty: easy\nReasoning:\nStep 1: <b>One</b>, as in Smith v Jones.\n"
    "Answer: The last day: 3 May 2027.\nCase Citation: Limitation Act 1980, s 5"
)


@pytest.fixture
def answering(load_script, tiny_model_dir, capsys):
    """answering(*flags): the output of a run in the terminal."""

    def run(*flags) -> str:
        module = load_script("run_legal_assistant")
        argv = ["--model", str(tiny_model_dir), "--device", "cpu", "--max-new-tokens", "5", *map(str, flags)]
        module.main(parse(module.Config, "run_legal_assistant", argv))
        return capsys.readouterr().out

    return run


# -- HTML ------------------------------------------------------------------------------------------------------------
def test_sections_are_separate_and_citations_outside_the_list_are_marked():
    html = show(Answer.read(SAID, True), Authorities(AUTHORITIES), whole=True)
    assert html.count("<section") == 6 and "&lt;b&gt;One&lt;/b&gt;" in html and "<b>" not in html
    assert '<p class="known">✓ Limitation Act 1980, s 5</p>' in html
    assert '<p class="unknown">✗ Smith v Jones: not in the list of authorities</p>' in html


def test_an_unfinished_answer_has_no_verdict_yet():
    html = show(Answer.read(SAID[:40], False), Authorities(AUTHORITIES), whole=False)
    assert html.count("<section") == 2 and "verdict" not in html


def test_an_answer_without_sections_says_so():
    html = show(Answer.read("I do not know.", True), Authorities(AUTHORITIES), whole=True)
    assert "I do not know." in html and "nothing is cited" in html and "not all there" in html
    assert "cut off" not in html and "cut off" in show(Answer.read("I do", False), Authorities(AUTHORITIES), whole=True)


def test_another_list_gives_other_verdicts():
    assert verdicts(Answer.read(SAID, True), Authorities(["Smith v Jones"])) == [
        ("Smith v Jones", True),
        ("Limitation Act 1980, s 5", False),
    ]


# -- terminal --------------------------------------------------------------------------------------------------------
def test_an_answer_in_the_terminal(answering):
    said = answering("--question", "Until when?").splitlines()
    assert "28 authorities" in said[0] and len(said) >= 2
    assert said == answering("--question", "Until when?").splitlines(), "greedy"


def test_sampled_answers_differ_and_the_seed_repeats_them(answering, monkeypatch):
    def asked(*flags) -> list[str]:
        monkeypatch.setattr(sys, "stdin", StringIO("Until when?\n" * 3))
        said = answering("--temperature", 1, "--max-new-tokens", 12, *flags).splitlines()
        return [line for line in said[1:] if line[:1] not in "✓✗"]

    first = asked("--seed", 3)
    assert len(first) >= 3 and len(set(first)) == len(first), "each answer differs"
    assert asked("--seed", 3) == first != asked("--seed", 4)


UNSEEN = ["", "   ", "\n\t", "\u200b\u00ad", "\ufeff \u00a0", "\ufe0f", "\x00\x07"]


@pytest.mark.parametrize("question", UNSEEN[1:])
def test_an_invisible_question_is_refused(refusal, question):
    said = refusal("run_legal_assistant", "--model", "never/loaded", "--question", question)
    assert said == "error: the question is empty; type one\n"


def test_invisible_lines_are_skipped(answering, monkeypatch):
    monkeypatch.setattr(sys, "stdin", StringIO("\n  \n\u200b\n\ufeff\nUntil when?\n"))
    said = answering()
    monkeypatch.setattr(sys, "stdin", StringIO("Until when?\n"))
    assert said == answering()


@pytest.mark.parametrize("question", [None, *UNSEEN])
def test_the_page_refuses_invisible_questions_too(question):
    blocks = page(lambda text: pytest.fail("asked"), Authorities(AUTHORITIES), "", False)
    answered = next(event.fn for event in blocks.fns.values() if event.name == "answered")
    (said,) = answered(question)
    assert said == '<div class="law"><p class="unknown">the question is empty; type one</p></div>'


# -- the base model of a run -----------------------------------------------------------------------------------------
SMALL = "--count 60 --length 512 --batch-size 2 --accumulation-steps 1 --epochs 0.1 --lora-r 2 --eval-answers 0 "
SMALL += "--final-answers 0 --eval-every 0 --save-every 0 --max-new-tokens 4 --device cpu --precision fp32"


@pytest.fixture(scope="module")
def project(load_script, tiny_model_dir, tmp_path_factory):
    """A folder with the model m/tiny and the runs runs/plain and runs/int4, trained on it under that relative path."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(tiny_model_dir, folder / "m" / "tiny")
    module = load_script("train_cot_sft")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, *flags in (("plain",), ("int4", "--quantize", "int4/g32")):
            argv = ["--model", "m/tiny", "--output-dir", f"runs/{name}", *SMALL.split(), *flags]
            module.main(parse(module.Config, "train_cot_sft", argv))
    return folder


@pytest.fixture
def elsewhere(project, tmp_path, monkeypatch):
    """A copy of the project, used from another working directory; the original model is moved away."""
    folder = shutil.copytree(project, tmp_path / "project")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (project / "m").rename(project / "away")
    yield folder
    (project / "away").rename(project / "m")


def asking(load_script, *flags) -> None:
    module = load_script("run_legal_assistant")
    argv = ["--question", "Until when?", "--device", "cpu", *map(str, flags)]
    module.main(parse(module.Config, "run_legal_assistant", argv))


@pytest.mark.parametrize("name", ["plain", "int4"])
def test_a_run_finds_its_base_model_from_any_folder(load_script, project, tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    asking(load_script, "--run", project / "runs" / name)
    assert str(project / "m" / "tiny") in capsys.readouterr().out


@pytest.mark.parametrize("name", ["plain", "int4"])
@pytest.mark.parametrize("old", [False, True])
def test_a_run_moved_with_its_base_model_finds_it(load_script, elsewhere, capsys, name, old):
    """old: the adapter records its base by the relative path that was given."""
    if old:
        forget(elsewhere / "runs" / name)
    asking(load_script, "--run", elsewhere / "runs" / name)
    assert str(elsewhere / "m" / "tiny") in capsys.readouterr().out


@pytest.mark.parametrize("name", ["plain", "int4"])
@pytest.mark.parametrize("old", [False, True])
def test_the_error_names_a_missing_base_model(load_script, refusal, elsewhere, project, capsys, monkeypatch, name, old):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    run = elsewhere / "runs" / name
    if old:
        forget(run)
    (elsewhere / "m").rename(elsewhere / "moved")
    said = refusal("run_legal_assistant", "--run", run, "--question", "Until when?", "--device", "cpu")
    named = "'m/tiny', which is in no folder above" if old else f"{project / 'm' / 'tiny'}, which is missing"
    assert named in said and said.endswith("; give its path with --model\n") and said.count("\n") == 1
    asking(load_script, "--run", run, "--model", elsewhere / "moved" / "tiny")


def forget(run: Path) -> None:
    """Rewrite the adapter's config as earlier versions wrote it, with its checksum in origin.json."""
    file = run / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "m/tiny"}))
    origin = run / "adapter" / "origin.json"
    content = json.loads(origin.read_text())
    content["sha256"][file.name] = sha256(file)
    origin.write_text(json.dumps(content))


# -- terminal: bad input ---------------------------------------------------------------------------------------------
def test_after_a_question_that_cannot_be_answered_the_next_one_is(answering, monkeypatch):
    monkeypatch.setattr(sys, "stdin", StringIO("word " * 600 + "\nUntil when?\n"))
    said = answering()
    assert "not answered: a prompt of" in said and said == said.rstrip() + "\n"
    assert len(said.splitlines()) >= 3, "the second is answered"


@pytest.mark.xla
def test_xla_is_refused(refusal):
    assert "XLA" in refusal("run_legal_assistant", "--device", "xla")


def test_bad_input(refusal, tmp_path, tiny_model_dir):
    for flags, part in [
        (["--web", "--question", "x"], "exclude each other"),
        (["--run", tmp_path, "--model", "x"], "leave one of them out"),
        (["--run", tmp_path], "config.yaml is missing"),
        (["--port", "0"], "--port 0 must be from 1 to 65,535"),
        (["--authorities", tmp_path / "none.json"], "none.json"),
        (["--top-p", "0"], "--top-p 0.0 must be above 0"),
        (["--temperature", "1e-40"], "temperature=1e-40"),
        (
            ["--max-new-tokens", "1000000000000", "--model", tiny_model_dir, "--device", "cpu"],
            "--max-new-tokens 1000000000000 leaves no room for a prompt",
        ),
        (["--web", "--host", "no..such"], "--host no..such --port 7860 cannot be opened ("),
        (
            ["--web", "--host", "192.0.2.7"],
            "--host 192.0.2.7 --port 7860 cannot be opened (Cannot assign requested add",
        ),
    ]:
        assert part in refusal("run_legal_assistant", *flags)
    for text, part in [
        ("model: x", "or how long an answer may be"),
        ("model: x\nmax_new_tokens: 9", "has not finished"),
    ]:
        (tmp_path / "config.yaml").write_text(text)
        assert part in refusal("run_legal_assistant", "--run", tmp_path)
    (tmp_path / "list.json").write_text("{}")
    assert 'holds no list "authorities"' in refusal("run_legal_assistant", "--authorities", tmp_path / "list.json")


# -- page ------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def address(tiny_model_dir, tmp_path_factory):
    """The address of the page, which the script serves in its own process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("page") / "log"
    command = [sys.executable, ROOT / "scripts/run_legal_assistant.py", "--web", "--model", tiny_model_dir]
    with open(log, "w") as out:
        served = subprocess.Popen(
            [*command, "--device", "cpu", "--port", str(port), "--max-new-tokens", "40"], stdout=out, stderr=out
        )
    try:
        for _ in range(600):
            assert served.poll() is None, log.read_text()
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        served.terminate()
        served.wait()


@pytest.fixture
def browser(tmp_path):
    if not (CHROMIUM and DRIVER):
        pytest.skip("no chromium and chromedriver on this machine (Debian: chromium, chromium-driver)")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def text_of(browser, element: str) -> str:
    from selenium.webdriver.common.by import By

    return browser.find_element(By.ID, element).text


def wait_for(browser, element: str, part: str) -> str:
    deadline = time.monotonic() + PATIENCE
    while part not in text_of(browser, element):
        assert time.monotonic() < deadline, text_of(browser, element)
        time.sleep(0.2)
    return text_of(browser, element)


def test_the_page_shows_an_answer_with_its_verdict(address, browser):
    from selenium.webdriver.common.by import By

    browser.get(address)
    deadline = time.monotonic() + PATIENCE
    while not browser.find_elements(By.CSS_SELECTOR, "#question textarea") and time.monotonic() < deadline:
        time.sleep(0.2)
    browser.find_element(By.CSS_SELECTOR, "#question textarea").send_keys("Until when may I issue the claim?")
    browser.find_element(By.ID, "ask").click()
    said = wait_for(browser, "answer", "nothing is cited")
    assert "ANSWER WITHOUT SECTIONS" in said.upper() and "not all there" in said
    color = browser.find_element(By.CSS_SELECTOR, "#answer .unknown").value_of_css_property("color")
    assert "207, 34, 46" in color, "faults are red"
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert loaded and all(name.startswith((address, "data:", "blob:")) for name in loaded), "from other hosts"


def test_the_api_refuses_a_null_question(address):
    def posted(path: str, data: bytes | None) -> str:
        request = urllib.request.Request(f"{address}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            return reply.read().decode()

    event = json.loads(posted("/gradio_api/call/answered", b'{"data": [null]}'))["event_id"]
    said = posted(f"/gradio_api/call/answered/{event}", None)
    assert "the question is empty" in said and "event: complete" in said


def test_a_question_beyond_the_context_is_refused_on_the_page(address, browser):
    from selenium.webdriver.common.by import By

    browser.get(address)
    deadline = time.monotonic() + PATIENCE
    while not browser.find_elements(By.CSS_SELECTOR, "#question textarea") and time.monotonic() < deadline:
        time.sleep(0.2)
    browser.find_element(By.CSS_SELECTOR, "#question textarea").send_keys("word " * 400)
    browser.find_element(By.ID, "ask").click()
    assert "do not fit the model's context of 512" in wait_for(browser, "answer", "context")
