"""Every format from a small file of its own layout, through the same loader; and what malformed data is told."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import seed_of_run

from blendkv.errors import InputError
from blendkv.eval.datasets import load_items
from blendkv.eval.formats import FORMATS, RECORDS_PER_CONTEXT, Row
from blendkv.eval.metrics import ceiling
from blendkv.eval.synth import DEFAULT_COUNT, generate, parse_spec

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="shared/data is not here: it is no part of the package")

PAGES = [["Ann", ["Ann lives in Rome.", " She paints."]], ["Rome", ["Rome is in Italy."]]]
TWO_PAGES = ("Ann\nAnn lives in Rome. She paints.\n\n", "Rome\nRome is in Italy.\n\n")
QA = {"question": "Where does Ann live?", "answers": ["Rome", "Roma"]}
LONG = {"answers": ["Rome"], "length": 9, "language": "en", "all_classes": None, "_id": "f00"}
PASSAGES = "Passage 1:\nAnn\nAnn lives in Rome.\n\nPassage 2:\nRome\nRome is in Italy.\n"
DIALOGUES = "Dialogue: A: Hi!\nB: Lunch?\nSummary: B asks for lunch.\nDialogue: C: Late.\nSummary: C is late."

RECORDS = {
    "musique": {
        **QA, "ctxs": [{"title": "Ann", "text": "Ann lives in Rome. She paints."}, "Rome\nRome is in Italy.\n"],
    },
    "musique-paragraphs": {
        "id": "2hop__1_2",
        "paragraphs": [
            {"idx": 0, "title": "Ann", "paragraph_text": "Ann lives in Rome. She paints.", "is_supporting": True},
            {"idx": 1, "title": "Rome", "paragraph_text": "Rome is in Italy.", "is_supporting": False},
        ],
        "question": QA["question"], "answer": "Rome", "answer_aliases": ["Roma", "Rome"], "answerable": True,
    },
    "kv-retrieval": {"ordered_kv_records": [["k1", "v1"], ["k2", "v2"]], "key": "k2", "value": "v2"},
    "jsonl": {
        **QA, "contexts": ["Ann\nAnn lives in Rome. She paints.", {"title": "Rome", "text": "Rome is in Italy."}],
    },
    "longbench": {**LONG, "input": QA["question"], "context": PASSAGES, "dataset": "2wikimqa"},
    "2wikimqa": {
        "_id": "a1", "question": QA["question"], "answer": "Rome", "context": PAGES,
        "evidences": [["Ann", "lives in", "Rome"]], "supporting_facts": [["Ann", 0]],
    },
    "hotpotqa": {
        "id": "b2", "question": QA["question"], "answer": "Rome", "level": "hard",
        "context": {"title": [t for t, _ in PAGES], "sentences": [s for _, s in PAGES]},
    },
    "samsum": {"id": "13", "dialogue": "A: Hi!\r\nB: Lunch?", "summary": "B asks for lunch."},
    "multi_news": {"document": "First article.\n ||||| Second one. |||||", "summary": "– Two things happened."},
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    """Caches in the test's folder, no network, no bars."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def write(path, records):
    path.write_text("".join(f"{json.dumps(r)}\n" for r in records) if path.suffix == ".jsonl" else json.dumps(records))
    return str(path)


def one(tmp_path, record, format=None):
    (item,) = load_items(write(tmp_path / "data.json", [record]), format)
    return item


def test_every_format_has_a_record_here():
    assert tuple(RECORDS) == FORMATS.names()


@pytest.mark.parametrize("name", ["musique", "musique-paragraphs", "jsonl", "longbench", "2wikimqa", "hotpotqa"])
def test_questions_with_two_passages(tmp_path, name):
    item = one(tmp_path, RECORDS[name])
    assert item == one(tmp_path, RECORDS[name], name)
    assert item.id == f"{name}-0000"
    assert item.question == QA["question"]
    assert item.answers[0] == "Rome"
    expected = TWO_PAGES if name != "longbench" else ("Ann\nAnn lives in Rome.\n\n", TWO_PAGES[1])
    assert item.contexts == expected
    assert (item.task, item.max_new_tokens, item.instruction) == ("qa", 32, None)
    assert item.meta == {"id": RECORDS[name].get("id", RECORDS[name].get("_id"))} or not item.meta


def test_all_answers_are_kept_once(tmp_path):
    assert one(tmp_path, RECORDS["musique"]).answers == ("Rome", "Roma")
    assert one(tmp_path, RECORDS["musique-paragraphs"]).answers == ("Rome", "Roma")
    assert one(tmp_path, {**RECORDS["jsonl"], "answers": "Rome"}).answers == ("Rome",)


def test_musique_in_its_own_layout_under_its_name(tmp_path):
    item = one(tmp_path, RECORDS["musique-paragraphs"], "musique")
    assert item.contexts == TWO_PAGES
    assert item.id == "musique-0000"


def test_what_is_unanswerable_is_left_out_and_counted(tmp_path, caplog):
    asked = RECORDS["musique-paragraphs"]
    data = write(
        tmp_path / "data.jsonl", [{**asked, "answerable": False}, asked, {**asked, "answerable": False}, asked]
    )
    assert [i.id for i in load_items(data)] == ["musique-paragraphs-0001", "musique-paragraphs-0003"]
    assert [r.message for r in caplog.records] == ["2 records are marked as unanswerable and left out"]
    assert [i.id for i in load_items(data, limit=1)] == ["musique-paragraphs-0001"]
    with pytest.raises(InputError, match="all 1 records are marked as unanswerable"):
        one(tmp_path, {**asked, "answerable": False})


def test_pages_in_other_shapes(tmp_path):
    objects = [{"title": title, "sentences": sentences} for title, sentences in PAGES]
    for context in (json.dumps(PAGES), objects, json.dumps(objects)):
        assert one(tmp_path, {**RECORDS["2wikimqa"], "context": context}).contexts == TWO_PAGES


def test_duplicate_passages_are_kept(tmp_path):
    assert one(tmp_path, {**RECORDS["jsonl"], "contexts": ["same", "same"]}).contexts == ("same\n\n", "same\n\n")


def test_the_plain_form_may_say_more(tmp_path):
    record = {**RECORDS["jsonl"], "task": "summary", "instruction": "Sum up.", "id": 7}
    item = one(tmp_path, record)
    assert (item.task, item.max_new_tokens, item.instruction, item.meta) == ("summary", 128, "Sum up.", {"id": 7})
    assert one(tmp_path, {**record, "max_new_tokens": 9}).max_new_tokens == 9


@given(st.integers(1, 200))
def test_key_value_records_are_cut_evenly_and_completely(count):
    pairs = [[f"key {i}", f'va"lue {i}'] for i in range(count)]
    values = {"ordered_kv_records": pairs, "key": f"key {count - 1}", "value": f'va"lue {count - 1}'}
    chosen = FORMATS.get("kv-retrieval")
    item = chosen.read(Row(values, "here", "kv-0000", chosen.needs, lambda count: []))
    lines = [c.rstrip("\n").split("\n") for c in item.contexts]
    read = [list(pair) for part in lines for line in part for pair in json.loads(f"{{{line}}}").items()]
    assert read == pairs
    sizes = [len(part) for part in lines]
    assert max(sizes) <= RECORDS_PER_CONTEXT
    assert max(sizes) - min(sizes) <= 1
    assert item.answers == (values["value"],)
    assert all(c.endswith("\n\n") for c in item.contexts)


def test_longbench_summaries(tmp_path):
    news = {**LONG, "input": "", "context": PASSAGES, "dataset": "multi_news_e"}
    item = one(tmp_path, news)
    assert (item.task, item.max_new_tokens) == ("summary", 128)
    assert item.contexts[0] == "Ann\nAnn lives in Rome.\n\n"
    assert item.question
    assert "summary" in item.instruction
    chat = {**LONG, "input": "Dialogue: D: Bye!\nSummary: ", "context": DIALOGUES, "dataset": "samsum"}
    item = one(tmp_path, chat)
    assert item.contexts == (
        "Dialogue: A: Hi!\nB: Lunch?\nSummary: B asks for lunch.\n\n",
        "Dialogue: C: Late.\nSummary: C is late.\n\n",
    )
    assert item.task == "summary"
    assert item.question.endswith("\nDialogue: D: Bye!")
    assert "examples" in item.instruction
    with pytest.raises(InputError, match=r"record 1: LongBench's lcc is not one of 2wikimqa, .*multi_news"):
        one(tmp_path, {**news, "dataset": "lcc"})


def test_the_authors_few_shot_file_is_a_summary_task(tmp_path):
    record = {
        "question": "Dialogue: D: Bye!\nSummary: ",
        "answers": ["D leaves."],
        "ctxs": [{"title": "", "text": "x"}],
    }
    item = one(tmp_path, record)
    assert (item.task, item.contexts) == ("summary", ("x\n\n",))
    assert item.question.endswith("\nDialogue: D: Bye!")


def test_dialogues_are_examples_of_one_another(tmp_path):
    seed = seed_of_run()
    print(f"seed {seed}")
    records = [{"id": str(i), "dialogue": f"A: number {i}", "summary": f"A says {i}."} for i in range(9)]
    data = write(tmp_path / "data.jsonl", records)
    items = load_items(data, seed=seed)
    assert items == load_items(data, seed=seed)
    assert any(a != b for a, b in zip(items, load_items(data, seed=seed + 1), strict=True))
    assert items[:4] == load_items(data, seed=seed, limit=4)
    for i, item in enumerate(items):
        assert item.question.endswith(f"\nDialogue: A: number {i}")
        assert item.answers == (f"A says {i}.",)
        assert len(set(item.contexts)) == 5
        assert not any(f"number {i}\n" in c for c in item.contexts)
        assert all(re.fullmatch(r"Dialogue: A: number (\d)\nSummary: A says \1\.\n\n", c) for c in item.contexts)
    with pytest.raises(InputError, match="the only record, but other dialogues are its examples"):
        one(tmp_path, RECORDS["samsum"])


def test_news_articles(tmp_path):
    item = one(tmp_path, RECORDS["multi_news"])
    assert item.contexts == ("First article.\n\n", "Second one.\n\n")
    assert item.answers == ("Two things happened.",)
    assert (item.task, item.max_new_tokens) == ("summary", 128)


@pytest.mark.parametrize("name", [n for n in RECORDS if n not in ("musique", "jsonl", "kv-retrieval")])
def test_the_datasets_library_gives_the_same(tmp_path, name):
    """Parquet, as hub sets are stored, and a folder with splits."""
    records = [RECORDS[name]] * 3
    if name == "2wikimqa":  # pairs of a text and a list have no column type: hub copies keep them as JSON text
        records = [{**r, "context": json.dumps(PAGES), "evidences": "[]", "supporting_facts": "[]"} for r in records]
    table = datasets.Dataset.from_list(records)
    table.to_parquet(tmp_path / "data.parquet")
    items = load_items(str(tmp_path / "data.parquet"), limit=2)
    assert items == load_items(write(tmp_path / "data.jsonl", records), limit=2)
    splits = datasets.DatasetDict({"train": table.select([0]), "validation": table})
    splits.save_to_disk(tmp_path / "saved")
    assert load_items(str(tmp_path / "saved"), limit=2) == items
    if name != "samsum":
        assert load_items(str(tmp_path / "saved"), split="train") == items[:1]
    with pytest.raises(InputError, match="no split 'test' to ask from; splits there: train, validation"):
        load_items(str(tmp_path / "saved"), split="test")


def test_a_split_must_be_named_when_none_is_for_questions(tmp_path):
    table = datasets.Dataset.from_list([RECORDS["hotpotqa"]])
    datasets.DatasetDict({"train": table, "dev": table}).save_to_disk(tmp_path / "saved")
    with pytest.raises(InputError, match="splits there: train, dev: name one"):
        load_items(str(tmp_path / "saved"))
    assert len(load_items(str(tmp_path / "saved"), split="dev")) == 1


def test_a_folder_of_data_files(tmp_path):
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "test.jsonl", [RECORDS["hotpotqa"]])
    (item,) = load_items(str(tmp_path / "set"))
    assert item.contexts == TWO_PAGES


def test_files_in_other_wraps(tmp_path):
    records = [RECORDS["musique"]] * 2
    expected = load_items(write(tmp_path / "data.json", records))
    assert [i.id for i in expected] == ["musique-0000", "musique-0001"]
    lines = "\r\n\n".join(json.dumps(r) for r in records)
    (tmp_path / "lines.json").write_text(lines)
    (tmp_path / "marked.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "packed.json.gz").write_bytes(gzip.compress(json.dumps(records).encode()))
    (tmp_path / "under.json").write_text(json.dumps({"version": 1, "data": records}))
    for name in ("lines.json", "marked.jsonl", "packed.jsonl.gz", "packed.json.gz", "under.json"):
        assert load_items(str(tmp_path / name)) == expected, name
    (tmp_path / "single.json").write_text(json.dumps(records[0]) + "\n")
    assert load_items(str(tmp_path / "single.json")) == expected[:1]


def test_generated_items():
    kinds, difficulty = parse_spec("needles,values=3")
    assert load_items("needles,values=3", "synth", seed=4, limit=5) == generate(kinds, 5, 4, difficulty)
    assert load_items("needles,values=3", seed=4, limit=5) == generate(kinds, 5, 4, difficulty)
    assert len(load_items("mixed")) == DEFAULT_COUNT
    with pytest.raises(InputError, match="allowed, with commas between"):
        load_items("riddles", "synth")


def broken(name, **changes):
    return {k: v for k, v in {**RECORDS[name], **changes}.items() if v is not ...}


@pytest.mark.parametrize(
    ("name", "record", "message"),
    [
        ("musique", broken("musique", ctxs=...), "no field 'ctxs', only question, answers; its format needs"),
        ("musique", broken("musique", ctxs=[]), "'ctxs' is list '[]', a list of passages"),
        ("musique", broken("musique", ctxs=[{"title": "x"}]), "'ctxs'[0] has no 'text', only title"),
        ("musique", broken("musique", ctxs=["x", " \n"]), "'ctxs'[1] is empty"),
        ("musique", broken("musique", answers=[]), "'answers' is list '[]'"),
        ("musique", broken("musique", answers=["Rome", ""]), "'answers'[1] is empty"),
        ("musique", broken("musique", question="  "), "'question' is empty"),
        ("musique", broken("musique", question="\ud800?"), "'question' holds a lone surrogate"),
        ("musique", broken("musique-paragraphs", paragraphs="x"), "'paragraphs' is str 'x', a list of objects"),
        ("musique", broken("musique-paragraphs", paragraphs=[{}]), "'paragraphs'[0]['paragraph_text'] is NoneType"),
        ("kv-retrieval", broken("kv-retrieval", ordered_kv_records=[["a"]]), "no list of [key, value] pairs"),
        ("kv-retrieval", broken("kv-retrieval", value="v1"), "key and value are not among"),
        ("jsonl", broken("jsonl", answers=42), "'answers' is int '42', a text or a list of texts"),
        ("jsonl", broken("jsonl", contexts=[3]), "'contexts'[0] is int '3', text is needed"),
        ("jsonl", broken("jsonl", task="poem"), "'task' is 'poem', qa or summary"),
        ("jsonl", broken("jsonl", max_new_tokens=0), "'max_new_tokens' is 0, a whole number above 0"),
        ("longbench", broken("longbench", dataset=...), "no field 'dataset'"),
        ("hotpotqa", broken("hotpotqa", context="Ann"), "'context' is text, but no JSON"),
        ("hotpotqa", broken("hotpotqa", context=[["Ann", "x"]]), "pages of a title and a list of sentences"),
        ("hotpotqa", broken("hotpotqa", context={"title": [], "sentences": []}), "pages of a title"),
        ("hotpotqa", broken("hotpotqa", answer=""), "'answer' is empty"),
        ("multi_news", broken("multi_news", document=" ||||| "), "'document' holds no article"),
        ("multi_news", broken("multi_news", summary=" – "), "'summary' behind its dash is empty"),
    ],
)  # fmt: skip
def test_a_malformed_record_is_named(tmp_path, name, record, message):
    """Whatever its place: the file, the line, what is wrong, what is needed."""
    place = random.Random(seed_of_run()).randrange(3)
    records = [RECORDS[name]] * place + [record]
    data = write(tmp_path / "data.jsonl", records)
    with pytest.raises(InputError) as caught:
        load_items(data, name)
    assert str(caught.value).startswith(f"{data}, line {place + 1}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    if place:
        assert len(load_items(data, name, limit=place)) == place


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": \n', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", "", "holds no record"),
        ("a.json", "[]", "holds no record"),
        ("a.json", "[1]", "a.json, record 1: a JSON int; an object with fields is needed"),
        ("a.json", "[{]", "a.json is not JSON"),
        ("a.json", '{\n"a": 1\n}', "holds a JSON dict; a list of records is needed"),
        ("a.json", "3", "holds a JSON int; a list of records is needed"),
        ("a.json", '[{"foo": 1, "bar": 2}]', "fields foo, bar fit no format; formats: musique (ctxs, question,"),
        ("a.txt", "x", "suffixes allowed: .json, .jsonl"),
        ("a.jsonl.gz", "not gzip", "cannot be read"),
        ("a.parquet", "not parquet", "cannot be loaded"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_data(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError) as caught:
        load_items(str(tmp_path / name))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no-such.json",), "no-such.json: no such file or folder; give a file, NAME"),
        (("some one/else",), "no such file or folder"),
        (
            ("nobody/nothing",),
            "nobody/nothing cannot be loaded .*; check the name and the network, or give a local file",
        ),
        (("hf:nobody/nothing:config@test",), "cannot be loaded"),
        (("mixed", "squad"), "unknown format of evaluation data 'squad'; allowed: musique, .*, synth"),
    ],
)
def test_wrong_names(arguments, message):
    with pytest.raises(InputError, match=message):
        load_items(*arguments)


def test_wrong_options(tmp_path):
    data = write(tmp_path / "data.jsonl", [RECORDS["jsonl"]])
    with pytest.raises(InputError, match="limit 0; 1 or more"):
        load_items(data, limit=0)
    with pytest.raises(InputError, match="a file has none"):
        load_items(data, split="test")
    with pytest.raises(InputError, match="split 'test' of generated items"):
        load_items("mixed", "synth", split="test")


@needs_shared
def test_musique_60():
    items = load_items(str(SHARED / "musique_60.json"), "musique")
    assert items == load_items(str(SHARED / "musique_60.json"))
    assert len(items) == 60
    assert {len(i.contexts) for i in items} == {10}
    assert items[7].id == "musique-0007"
    assert 0.6 < sum(ceiling(i.answers, i.contexts) for i in items) / 60 < 0.9
    assert load_items(str(SHARED / "musique_60.json"), limit=24) == items[:24]


@needs_shared
def test_kv_retrieval():
    items = load_items(str(SHARED / "kv_retrieval_75_keys_40.jsonl"))
    assert len(items) == 40
    assert all(len(i.contexts) == 8 and ceiling(i.answers, i.contexts) for i in items)
    assert all(i.max_new_tokens == 48 for i in items)


def test_the_examples_of_the_page_are_read(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "eval-data.md").read_text()
    examples = dict(re.findall(r"^## `([\w-]+)`\n.*?```json\n(.*?)```", page, re.M | re.S))
    assert sorted(examples) == sorted(FORMATS.names())
    for name, lines in examples.items():
        (tmp_path / "data.jsonl").write_text(lines)
        items = load_items(str(tmp_path / "data.jsonl"))
        assert [i.id for i in items] == [f"{name}-{n:04d}" for n in range(len(lines.splitlines()))]
