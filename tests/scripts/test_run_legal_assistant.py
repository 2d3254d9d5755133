"""The assistant in the terminal and on its web page, opened in a real browser."""

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from io import StringIO
from pathlib import Path

import pytest
from forked import ROOT
from patience import PATIENCE, wait_until
from ports import free_port

from qat_lora.experiments.legal.authorities import Authorities
from qat_lora.experiments.legal.page import page, show, verdicts
from qat_lora.experiments.legal.rules import AUTHORITIES
from qat_lora.experiments.legal.sections import Answer
from qat_lora.run.files import sha256

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
FLAGS += "--disable-component-update --disable-sync --disable-dev-shm-usage"
SAID = (
    "Topic: contract\nDifficulty: easy\nReasoning:\nStep 1: <b>One</b>, as in Smith v Jones.\n"
    "Answer: The last day: 3 May 2027.\nCase Citation: Limitation Act 1980, s 5"
)


@pytest.fixture
def answering(run, tiny_model_dir, capsys):
    """answering(*flags): the output of a run in the terminal."""

    def said(*flags) -> str:
        model = ["--model", tiny_model_dir, "--device", "cpu", "--max-new-tokens", 5]
        run("run_legal_assistant", *model, *flags)
        return capsys.readouterr().out

    return said


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
    found = verdicts(Answer.read(SAID, True), Authorities(["Smith v Jones"]))
    assert found == [("Smith v Jones", True), ("Limitation Act 1980, s 5", False)]


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


def test_invisible_questions_are_refused(refusal):
    for question in UNSEEN[1:]:
        said = refusal("run_legal_assistant", "--model", "never/loaded", "--question", question)
        assert said == "error: the question is empty; type one\n"
    blocks = page(lambda text: pytest.fail("asked"), Authorities(AUTHORITIES), "", False)
    answered = next(event.fn for event in blocks.fns.values() if event.name == "answered")
    for question in (None, *UNSEEN):
        (said,) = answered(question)
        assert said == '<div class="law"><p class="unknown">the question is empty; type one</p></div>'


def test_invisible_lines_are_skipped(answering, monkeypatch):
    monkeypatch.setattr(sys, "stdin", StringIO("\n  \n\u200b\n\ufeff\nUntil when?\n"))
    said = answering()
    monkeypatch.setattr(sys, "stdin", StringIO("Until when?\n"))
    assert said == answering()


# -- the base model of a run -----------------------------------------------------------------------------------------
SMALL = "--count 60 --length 512 --batch-size 2 --accumulation-steps 1 --epochs 0.1 --lora-r 2 --eval-answers 0 "
SMALL += "--final-answers 0 --eval-every 0 --save-every 0 --max-new-tokens 4 --device cpu --precision fp32"


@pytest.fixture(scope="module")
def project(run, tiny_model_dir, tmp_path_factory):
    """A folder with the model m/tiny and the runs runs/plain and runs/int4, trained on it under that relative path."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(tiny_model_dir, folder / "m" / "tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, quantize in (("plain", "none"), ("int4", "int4/g32")):
            flags = ["--output-dir", f"runs/{name}", "--quantize", quantize]
            run("train_cot_sft", "--model", "m/tiny", *SMALL.split(), *flags)
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


ASK = ["--question", "Until when?", "--device", "cpu"]


@pytest.mark.parametrize("name", ["plain", "int4"])
def test_a_run_finds_its_base_model_from_any_folder(run, load_script, project, tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    folder = project / "runs" / name
    run("run_legal_assistant", *ASK, "--run", folder)
    said = capsys.readouterr().out
    assert str(project / "m" / "tiny") in said and f"+ {folder / 'adapter'}" in said
    module = load_script("run_legal_assistant")
    assert module.from_run(module.Config(run=str(folder))).max_new_tokens == 4, "as in its evaluation"
    assert module.from_run(module.Config(run=str(folder), max_new_tokens=3)).max_new_tokens == 3


@pytest.mark.parametrize("name", ["plain", "int4"])
@pytest.mark.parametrize("old", [False, True])
def test_a_moved_run_finds_the_base_model_that_was_moved_with_it_or_names_it(
    run, refusal, elsewhere, project, capsys, monkeypatch, name, old
):
    """old: the adapter records its base by the relative path that was given."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    flags = [*ASK, "--run", elsewhere / "runs" / name]
    if old:
        forget(elsewhere / "runs" / name)
    run("run_legal_assistant", *flags)
    assert str(elsewhere / "m" / "tiny") in capsys.readouterr().out
    (elsewhere / "m").rename(elsewhere / "moved")
    said = refusal("run_legal_assistant", *flags)
    named = "'m/tiny', which is in no folder above" if old else f"{project / 'm' / 'tiny'}, which is missing"
    assert named in said and said.endswith("; give its path with --model\n")
    run("run_legal_assistant", *flags, "--model", elsewhere / "moved" / "tiny")


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
        (["--authorities", tmp_path / "none.json"], "none.json"),
        (["--temperature", "1e-40"], "temperature 1e-40"),
        (["--max-new-tokens", 10**12, "--model", tiny_model_dir, "--device", "cpu"], "000 leaves no room for a prompt"),
        (["--web", "--host", "no..such"], "--host no..such --port 7860 cannot be opened ("),
        (["--web", "--host", "192.0.2.7"], "192.0.2.7 --port 7860 cannot be opened (Cannot assign requested add"),
    ]:
        assert part in refusal("run_legal_assistant", *flags)
    (tmp_path / "config.yaml").write_text("model: x")
    assert "or how long an answer may be" in refusal("run_legal_assistant", "--run", tmp_path)
    (tmp_path / "config.yaml").write_text("model: x\nmax_new_tokens: 9")
    assert "has not finished" in refusal("run_legal_assistant", "--run", tmp_path)
    (tmp_path / "list.json").write_text("{}")
    assert 'holds no list "authorities"' in refusal("run_legal_assistant", "--authorities", tmp_path / "list.json")


# -- page ------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def address(tiny_model_dir, tmp_path_factory):
    """The address of the page, which the script serves in its own process."""
    port = free_port()
    log = tmp_path_factory.mktemp("page") / "log"
    command = [sys.executable, ROOT / "scripts/run_legal_assistant.py", "--web", "--model", tiny_model_dir]
    command += ["--device", "cpu", "--port", port, "--max-new-tokens", 40]
    with open(log, "w") as out:
        served = subprocess.Popen(list(map(str, command)), stdout=out, stderr=out)

    def answers() -> bool:
        assert served.poll() is None, log.read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_until(answers)
        yield f"http://127.0.0.1:{port}"
    finally:
        served.terminate()
        served.wait()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not (CHROMIUM and DRIVER):
        pytest.skip("no chromium and chromedriver on this machine (Debian: chromium, chromium-driver)")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    driver.command_executor.client_config.timeout = PATIENCE
    yield driver
    driver.quit()


@pytest.fixture
def ask(address, browser):
    """ask(question, part): the answer on the page, once it contains `part`."""
    from selenium.webdriver.common.by import By

    def answer(question: str, part: str) -> str:
        browser.get(address)
        wait_until(lambda: browser.find_elements(By.CSS_SELECTOR, "#question textarea"))
        browser.find_element(By.CSS_SELECTOR, "#question textarea").send_keys(question)
        browser.find_element(By.ID, "ask").click()
        wait_until(lambda: part in browser.find_element(By.ID, "answer").text)
        return browser.find_element(By.ID, "answer").text

    return answer


def test_the_page_shows_an_answer_with_its_verdict(address, browser, ask):
    said = ask("Until when may I issue the claim?", "nothing is cited")
    assert "ANSWER WITHOUT SECTIONS" in said.upper() and "not all there" in said
    color = browser.find_element("css selector", "#answer .unknown").value_of_css_property("color")
    assert "207, 34, 46" in color, "faults are red"
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert loaded and all(name.startswith((address, "data:", "blob:")) for name in loaded), "from other hosts"


def test_closing_the_page_stops_an_answer_that_has_no_text_to_show_yet():
    """A page that is closed is noticed at the next piece, so every token has to be one."""
    left = threading.Event()

    class Silent:
        ended = False

        def __iter__(self):
            try:
                while True:
                    time.sleep(0.05)
                    yield ""
            finally:
                left.set()

    blocks = page(lambda question: Silent(), Authorities([]), "", False)
    blocks.launch(server_port=free_port(), prevent_thread_lock=True, quiet=True)
    try:
        api = f"{blocks.local_url}gradio_api"
        number = next(number for number, event in blocks.fns.items() if event.name == "answered")
        data = json.dumps({"data": ["Until when?"], "fn_index": number, "session_hash": "a"}).encode()
        urllib.request.urlopen(urllib.request.Request(f"{api}/queue/join", data, {"Content-Type": "application/json"}))
        with urllib.request.urlopen(f"{api}/queue/data?session_hash=a", timeout=PATIENCE) as shown:
            while b"thinking" not in shown.readline():
                pass
        assert left.wait(PATIENCE)
    finally:
        blocks.close()


def test_the_api_refuses_a_null_question(address):
    def posted(path: str, data: bytes | None) -> str:
        request = urllib.request.Request(f"{address}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            return reply.read().decode()

    event = json.loads(posted("/gradio_api/call/answered", b'{"data": [null]}'))["event_id"]
    said = posted(f"/gradio_api/call/answered/{event}", None)
    assert "the question is empty" in said and "event: complete" in said


def test_a_question_beyond_the_context_is_refused_on_the_page(ask):
    assert "do not fit the model's context of 512" in ask("word " * 400, "context")
