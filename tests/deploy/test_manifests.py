"""The Dockerfile, the compose file and the manifests, against the flags, routes and metrics that quire has."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest
import yaml

from quire.cli import serve
from quire.server.app import ROUTERS
from quire.server.config import ServerConfig
from quire.server.metrics import Metrics
from quire.server.middleware import PUBLIC_PATHS

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
MANIFESTS = {path.stem: yaml.safe_load(path.read_text()) for path in KUBERNETES.glob("*.yaml")}
POD = MANIFESTS["deployment"]["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
LABEL = {"app.kubernetes.io/name": "quire"}


def options(command: list[str]) -> argparse.Namespace:
    """What `quire` makes of a command. A flag that it does not have ends the process."""
    assert command[0] == "serve"
    parser = argparse.ArgumentParser(exit_on_error=False)
    serve.add_arguments(parser)
    return parser.parse_args(command[1:])


def test_the_image_starts_the_server():
    (command,) = re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.M)
    assert options(json.loads(command)).host == "0.0.0.0"
    assert f"EXPOSE {ServerConfig().port}" in DOCKERFILE
    extras = re.findall(r"EXTRAS=\[([\w,-]+)\]", DOCKERFILE)
    known = re.findall(r"^(\w[\w-]*) = \[", (ROOT / "pyproject.toml").read_text(), re.M)
    assert {name for each in extras for name in each.split(",")} <= set(known)


def test_the_compose_file_starts_the_server():
    service = COMPOSE["services"]["quire"]
    given = options([re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in service["command"]])
    assert (given.model, given.host, given.port) == ("smollm2:135m", "0.0.0.0", 8000)
    assert int(service["stop_grace_period"].removesuffix("s")) >= given.drain_timeout + 10
    assert service["volumes"] == ["models:/models"]
    assert "http://127.0.0.1:8000/ready" in service["healthcheck"]["test"][-1]
    assert (ROOT / "deploy" / "prometheus" / "prometheus.yml").exists()


def test_the_deployment_starts_the_server():
    given = options(CONTAINER["args"])
    assert given.host == "0.0.0.0"
    assert CONTAINER["ports"] == [{"name": "http", "containerPort": given.port}]
    pause_s = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert POD["terminationGracePeriodSeconds"] >= pause_s + given.drain_timeout + 10
    assert str(given.threads) == CONTAINER["resources"]["requests"]["cpu"]
    assert "QUIRE_API_KEY" in {each["name"] for each in CONTAINER["env"]}
    assert str(POD["securityContext"]["runAsUser"]) in DOCKERFILE
    mounted = {each["mountPath"] for each in CONTAINER["volumeMounts"]}
    assert mounted == {"/models", "/tmp"}
    assert all(f"={path}" in DOCKERFILE for path in mounted), "what is written where the image cannot be"


def test_probes_need_no_key():
    paths = {CONTAINER[kind]["httpGet"]["path"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == PUBLIC_PATHS
    assert paths <= {route.path for router in ROUTERS for route in router.routes}


def test_what_is_scaled_on_is_measured():
    metrics = {family.name for family in Metrics().registry.collect()}
    wanted = [each["pods"]["metric"]["name"] for each in MANIFESTS["autoscaler"]["spec"]["metrics"]]
    assert wanted
    assert set(wanted) <= metrics


def test_names_and_labels_agree():
    kustomization = MANIFESTS.pop("kustomization")
    assert sorted(kustomization["resources"]) == sorted(f"{name}.yaml" for name in MANIFESTS)
    spec = MANIFESTS["deployment"]["spec"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"] == LABEL
    assert MANIFESTS["service"]["spec"]["selector"] == LABEL
    assert MANIFESTS["disruption"]["spec"]["selector"]["matchLabels"] == LABEL
    assert MANIFESTS["autoscaler"]["spec"]["scaleTargetRef"]["name"] == MANIFESTS["deployment"]["metadata"]["name"]
    claims = [each["persistentVolumeClaim"]["claimName"] for each in POD["volumes"] if "persistentVolumeClaim" in each]
    assert claims == [MANIFESTS["models"]["metadata"]["name"]]
