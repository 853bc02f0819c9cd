"""The files of `deploy/`: programs that read them accept them, and they agree with the engine."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.deployed import (
    ALERTS,
    DASHBOARD,
    DEPLOY,
    alert_expressions,
    dashboard_expressions,
    documents,
    program,
)
from support.dockerfile import Step, steps_of
from support.served import forked
from support.source_tree import ROOT

from engine.cli.main import make_parser

DOCKERFILES = sorted(DEPLOY.glob("Dockerfile*[!e]"))
MANIFESTS = sorted(DEPLOY.glob("k8s/*.yaml"))
UNIT = DEPLOY / "systemd" / "metronome.service"
NOT_OF_THE_API = (
    "kustomization.yaml", "prometheus-adapter.yaml", "prometheus-operator.yaml",
    "prometheus-rules.yaml",
)  # fmt: skip
MAX_EXPOSURE = 20  # tenths; "safe" ends there


def checked(*command: str, **more: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def deployment() -> Any:
    return documents(DEPLOY / "k8s" / "deployment.yaml")[0]


def pod() -> Any:
    return deployment()["spec"]["template"]["spec"]


def seconds_of(option: str, arguments: list[str]) -> float:
    """The value of an option that is written as OPTION=VALUE or as two arguments."""
    found = re.search(rf"{option}[= ](\S+)", " ".join(arguments))
    assert found is not None
    return float(found[1])


def commands() -> dict[str, list[str]]:
    """Every command line of `metronome` in these files, by where it is."""
    found = {}
    for path in DOCKERFILES:
        steps = steps_of(path)
        (default,) = (json.loads(text) for keyword, text in steps if keyword == "CMD")
        found[path.name] = default
        (prepare,) = (text for keyword, text in steps if "metronome prepare" in text)
        line = re.search(r"metronome (prepare .*?) \$\{PREPARE_OPTIONS\}", prepare)
        assert line is not None
        found[f"{path.name}, prepare"] = shlex.split(line[1])
    found["compose.yaml"] = documents(DEPLOY / "compose.yaml")[0]["services"]["server"]["command"]
    found["deployment.yaml"] = pod()["containers"][0]["args"]
    line = re.search(r"^ExecStart=\S+ (.+)$", UNIT.read_text(), re.MULTILINE)
    assert line is not None
    found["metronome.service"] = shlex.split(line[1])
    return found


@pytest.mark.parametrize("where", commands())
def test_every_option_exists(where: str) -> None:
    command = commands()[where]
    parsed, unknown = make_parser(command).parse_known_args(command)
    assert unknown == [] and parsed.command == command[0]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_copies_what_exists_and_runs_as_no_root(path: Path) -> None:
    steps = steps_of(path)
    copied = [name for keyword, text in steps if keyword == "COPY" for name in text.split()[:-1]]
    assert copied and all((ROOT / name).exists() for name in copied)
    ignored = path.with_name(f"{path.name}.dockerignore").read_text().splitlines()
    assert all(f"!{name.split('/')[0]}" in ignored for name in copied)
    assert [text for keyword, text in steps if keyword == "USER"] == ["10001:10001"]
    assert steps[-2] == Step("ENTRYPOINT", '["metronome"]')


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    assert checked(program("hadolint"), str(path)) == ""


def test_unknown_instructions_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text("FROM debian\nONBUILD RUN true\n")
    with pytest.raises(AssertionError, match="ONBUILD"):
        steps_of(file)


@pytest.mark.parametrize(
    "path", [each for each in MANIFESTS if each.name not in NOT_OF_THE_API], ids=lambda p: p.name
)
def test_kubernetes_knows_every_field(path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    for each in documents(path):
        assert validate(each, "1.31", strict=True) == "1.31"


def test_manifests_belong_together() -> None:
    (kustomization,) = documents(DEPLOY / "k8s" / "kustomization.yaml")
    others = {each.name for each in MANIFESTS} - set(NOT_OF_THE_API)
    assert set(kustomization["resources"]) == others
    labels = deployment()["spec"]["template"]["metadata"]["labels"]
    (service,), (budget,) = (documents(DEPLOY / "k8s" / f"{name}.yaml") for name in (
        "service", "disruption",
    ))  # fmt: skip
    assert deployment()["spec"]["selector"]["matchLabels"] == labels
    assert budget["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == labels
    (container,) = pod()["containers"]
    (port,) = (each["name"] for each in container["ports"])
    assert service["spec"]["ports"][0]["targetPort"] == port
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == port
    assert {each["name"] for each in container["volumeMounts"]} == {
        each["name"] for each in pod()["volumes"]
    }


def test_every_container_of_a_pod_is_locked_down() -> None:
    assert pod()["securityContext"]["runAsNonRoot"]
    containers = [*pod()["initContainers"], *pod()["containers"]]
    assert len({each["image"] for each in containers}) == 1
    for each in containers:
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_prometheus_in_a_cluster_scrapes_the_pods() -> None:
    (monitor,) = documents(DEPLOY / "k8s" / "prometheus-operator.yaml")
    labels = deployment()["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"] == labels
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (container,) = pod()["containers"]
    assert endpoint["port"] in {each["name"] for each in container["ports"]}
    secrets = [each["secret"]["secretName"] for each in pod()["volumes"] if "secret" in each]
    assert endpoint["authorization"]["credentials"]["name"] in secrets
    # Alerts ask for this job.
    assert labels[monitor["spec"]["jobLabel"]] == "metronome"


def test_prometheus_in_a_cluster_has_the_same_alerts() -> None:
    (rules,) = documents(DEPLOY / "k8s" / "prometheus-rules.yaml")
    assert [rules["spec"]] == documents(ALERTS)


def test_scaling_reads_a_metric_that_the_adapter_offers() -> None:
    (scaling,) = documents(DEPLOY / "k8s" / "scaling.yaml")
    (adapter,) = documents(DEPLOY / "k8s" / "prometheus-adapter.yaml")
    names = {each["pods"]["metric"]["name"] for each in scaling["spec"]["metrics"]}
    assert names == {each["name"]["as"] for each in adapter["rules"]["custom"]}
    assert scaling["spec"]["scaleTargetRef"]["name"] == deployment()["metadata"]["name"]


def test_whoever_ends_the_server_waits_longer_than_it_drains() -> None:
    (container,) = pod()["containers"]
    before = float(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    drain = seconds_of("--drain-timeout", container["args"])
    assert pod()["terminationGracePeriodSeconds"] > before + drain
    server = documents(DEPLOY / "compose.yaml")[0]["services"]["server"]
    grace = float(server["stop_grace_period"].removesuffix("s"))
    assert grace > seconds_of("--drain-timeout", server["command"])
    text = UNIT.read_text()
    assert seconds_of("TimeoutStopSec", [text]) > seconds_of("--drain-timeout", [text])


def test_systemd_accepts_the_unit_and_finds_it_safe(tmp_path: Path) -> None:
    analyze = program("systemd-analyze")
    unit = tmp_path / "metronome.service"
    unit.write_text(UNIT.read_text().replace("/opt/metronome/bin/metronome", "/bin/true"))
    assert checked(analyze, "verify", "--man=no", str(unit)) == ""
    checked(analyze, "security", "--offline=true", f"--threshold={MAX_EXPOSURE}", str(unit))


def test_prometheus_accepts_the_rules_and_each_alert_fires_when_it_should() -> None:
    promtool = program("promtool")
    config = str(DEPLOY / "prometheus" / "prometheus.yml")
    for command in (
        ("check", "config", "--syntax-only", config),
        ("check", "rules", str(ALERTS)),
        ("test", "rules", str(ALERTS.with_name("alerts_test.yml"))),
    ):
        assert "SUCCESS" in checked(promtool, *command)


def test_every_metric_of_dashboard_and_alerts_exists() -> None:
    options = ("--num-threads", "1", "--max-model-len", "256", "--num-kv-blocks", "64")
    with forked(*options, "--dtype", "float32", "--kv-offloading-size", "0.01") as server:
        body = {"model": "box", "prompt": "Once", "max_tokens": 4}
        assert server.ask("/v1/completions", body).status == 200
        page = server.ask("/metrics").body.decode()
    # A counter by reason has no line until the first reason has occurred.
    names = set(re.findall(r"^(?:# TYPE )?(\w+)[{ ]", page, re.MULTILINE))
    for where, text in [*dashboard_expressions(), *alert_expressions()]:
        used = set(re.findall(r"\b(?:metronome|process)_\w+", text)) - {"metronome"}
        assert used <= names, f"{where}: {sorted(used - names)}"


def test_the_dashboard_is_whole() -> None:
    board = json.loads(DASHBOARD.read_text())
    panels = [each for each in board["panels"] if each["type"] != "row"]
    assert len({each["title"] for each in panels}) == len(panels) >= 20
    assert len({each["id"] for each in board["panels"]}) == len(board["panels"])
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) - {"__rate_interval"}
    assert used == {each["name"] for each in board["templating"]["list"]}
    places = [each["gridPos"] for each in board["panels"]]
    cells = [
        (x, y)
        for each in places
        for x in range(each["x"], each["x"] + each["w"])
        for y in range(each["y"], each["y"] + each["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24


@pytest.mark.parametrize(
    "path", sorted(DEPLOY.rglob("*.y*ml")), ids=lambda path: str(path.relative_to(DEPLOY))
)
def test_files_that_others_name_exist(path: Path) -> None:
    for document in documents(path):
        assert document
    if path.name == "compose.yaml":
        for service in documents(path)[0]["services"].values():
            mounts = [each for each in service.get("volumes", ()) if each.startswith("./")]
            assert all((DEPLOY / each.split(":")[0]).exists() for each in mounts)
            if "build" in service:
                context = DEPLOY / service["build"]["context"]
                assert (context / service["build"]["dockerfile"]).exists()
