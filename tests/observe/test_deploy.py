"""Dashboard and alerts name only what a live server and a live daemon export; the unit file's command runs."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import subprocess
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import yaml
from daemon_process import DaemonProcess, eventually
from prometheus_client.parser import text_string_to_metric_families
from promql import named
from serving import chat
from tiny_hub import SYSTEM, BagEmbedder, open_pipeline, write_corpus
from verdicts import put_verdict

from blendkv.daemon.client import DaemonStore
from blendkv.pipeline import RagPipeline
from blendkv.retrieval.collection import Collection
from blendkv.retrieval.retriever import HybridRetriever
from blendkv.serve.app import create_app
from blendkv.serve.backends import Backends
from blendkv.serve.settings import ServeSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
ADDED = {"job", "instance"}
"""Labels that Prometheus adds."""


def labels_of(page: str) -> dict[str, dict[str, set[str]]]:
    """The values of every label of every sample of a page, by the sample's name."""
    found: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


async def ask_and_read(backends: Backends) -> str:
    transport = httpx.ASGITransport(create_app(backends, ServeSettings(max_tokens=4)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
        for model in ("tiny", "tiny/rag/default", "tiny/rag/refused"):
            response = await client.post("/v1/chat/completions", json=chat(model))
            assert response.status_code == 200, response.text
        return (await client.get("/metrics")).text


@pytest.fixture(scope="module")
def exported(llama, tmp_path_factory):
    """What a server and a daemon export, after something happened in each."""
    folder = tmp_path_factory.mktemp("live")
    corpus = write_corpus(folder / "corpus")
    for name, codec in (("a", "raw"), ("b", "raw"), ("c", "int8")):  # the last: this process has used a codec
        with open_pipeline(folder / name, llama, codec=codec) as pipeline:
            pipeline.ingest([corpus], chunk_tokens=48)
    put_verdict(folder / "b", llama.fingerprint)
    with ExitStack() as stack:
        remote = ("--remote", f"file://{folder}/shared", "--metrics-port", "0")
        daemon = stack.enter_context(DaemonProcess(folder / "a", "1MB", *remote))
        store = stack.enter_context(DaemonStore(folder / "a", 20.0))
        collection, embedder = Collection(folder / "a"), BagEmbedder()
        retriever = HybridRetriever(collection, embedder)
        default = RagPipeline(
            llama, store, retriever, system=SYSTEM, top_k=3, collection=collection, embedder=embedder
        )  # fmt: skip
        stack.callback(default.close)
        refused = stack.enter_context(open_pipeline(folder / "b", llama))
        default.ask("a question", mode="reuse")
        store.discard(store.ls()[0].key, "checksum: a test")
        default.library.precompute([chunk.token_ids for chunk in collection.chunks()], None)
        eventually(lambda: store.stat().uploaded and not store.stat().upload_pending_bytes)
        engine = asyncio.run(ask_and_read(Backends("tiny", "torch", {"default": default, "refused": refused})))
        page = urllib.request.urlopen(daemon.ready["rows"][0]["metrics"]).read().decode()
    return labels_of(engine), labels_of(page)


def known(exported) -> dict[str, dict[str, set[str]]]:
    """Of both together."""
    engine, daemon = exported
    return {
        name: {
            label: engine.get(name, {}).get(label, set()) | daemon.get(name, {}).get(label, set())
            for label in {**engine.get(name, {}), **daemon.get(name, {})}
        }
        for name in {**engine, **daemon}
    }


def check(expression: str, exported) -> None:
    """All names in an expression exist, and all labels of its metrics."""
    found, live = named(expression), known(exported)
    assert found.metrics, expression
    for metric, labels in found.metrics.items():
        assert metric in live, f"{metric} is not exported: {expression}"
        assert labels <= live[metric].keys() | ADDED, f"{labels - live[metric].keys()} of {metric}: {expression}"
    assert found.groups <= ADDED.union(*(live[metric] for metric in found.metrics)), expression


def dashboard() -> dict:
    return json.loads((DEPLOY / "grafana.json").read_text())


def expressions() -> list[str]:
    found = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    return [re.sub(r"\$__rate_interval", "5m", expr) for expr in found]


def test_promql_is_read_rightly():
    found = named(
        'histogram_quantile(0.5, sum by (le, tier) (rate(a_bucket{x=~"b{c}|sum", y!="d"}[5m]))) / on (z) '
        'group_left (v) e > 0.5 * (f:g unless up{job="h"} offset 1h)'
    )
    assert found.metrics == {"a_bucket": {"x", "y"}, "e": set(), "f:g": set(), "up": {"job"}}
    assert found.groups == {"le", "tier", "z", "v"}


def test_every_query_of_the_dashboard_names_what_is_exported(exported):
    assert len(expressions()) > 40
    for expression in expressions():
        check(expression, exported)


def test_values_that_queries_select_are_exported(exported):
    """A look-up result or a state that nobody reports would be an empty panel."""
    live = known(exported)
    for expression in expressions():
        for metric, matchers in re.findall(r"(\w+)\{([^}]*)\}", expression):
            for label, value in re.findall(r'(\w+)="([^"]*)"', matchers):
                assert value in live[metric][label], expression


def test_the_dashboard_shows_all_there_is(exported):
    """Whoever adds a metric shows it, or says here why not."""
    shown = {metric for expression in expressions() for metric in named(expression).metrics}
    bare = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    hidden = {
        "blendkv_documents", "blendkv_http_requests_total", "blendkv_library_computed_tokens_total",
        "blendkv_prefill_avoided_seconds_total", "blendkv_prefill_spent_seconds_total", "blendkv_prefill_saved_seconds",
    }  # fmt: skip
    ours = {name for name in known(exported) if name.startswith("blendkv_") and not name.endswith("_created")}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in ours} - bare == hidden


def test_panels_do_not_overlap_and_have_ids_of_their_own():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_every_alert_names_what_is_exported(exported):
    groups = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 5
    live = known(exported)
    for rule in rules:
        check(rule["expr"], exported)
        (first, *_) = named(rule["expr"]).metrics
        used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert used <= live[first].keys() | ADDED, rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_the_unit_file_starts_a_daemon(tmp_path):
    unit = (DEPLOY / "blendkv-daemon.service").read_text()
    if shutil.which("systemd-analyze"):
        command = ["systemd-analyze", "verify", str(DEPLOY / "blendkv-daemon.service")]
        assert subprocess.run(command, capture_output=True, text=True).stderr == ""
    words = shlex.split(re.search(r"^ExecStart=(.*)$", unit, re.M)[1])
    assert words[:5] == ["/usr/bin/env", "blendkv", "daemon", "--store", "/var/lib/blendkv"]
    options = words[5:]
    options[options.index("--memory") + 1] = "1MB"
    options[options.index("--metrics-port") + 1] = "0"
    with DaemonProcess(tmp_path / "s", "1MB", *options) as daemon:
        url = daemon.ready["rows"][0]["metrics"]
        assert "blendkv_store_bytes" in labels_of(urllib.request.urlopen(url).read().decode())
        daemon.close()
