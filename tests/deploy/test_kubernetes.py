"""deploy/kubernetes: valid for Kubernetes, and in step with the server that it runs."""

import math
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tei_grpc.config import Settings
from tei_grpc.invocation import load
from tei_grpc.metrics import Metrics
from tei_grpc.rpc.health import LIVENESS, NAMES
from tei_grpc.runtime.drain import CUT_SECONDS
from tei_grpc.traces.recorder import CLOSE_SECONDS
from tests.deploy.manifests import KUBERNETES, OVERLAYS, ROOT, Manifests, compose, need_kubectl, render
from tests.needs import need

OLDEST = "1.27"  # the first with gRPC probes for everybody
COMPONENTS = sorted(folder.name for folder in (KUBERNETES / "components").iterdir())
CUSTOM = {"PodMonitor"}  # schemas of these come with their operators
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    need_kubectl()


@pytest.fixture(scope="module", params=[*OVERLAYS, "base", *COMPONENTS])
def manifests(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Manifests:
    """Each overlay, the base alone, and the base with each component."""
    if request.param in OVERLAYS:
        return render(KUBERNETES / "overlays" / request.param)
    components = [] if request.param == "base" else [request.param]
    return compose(tmp_path_factory.mktemp("kustomize"), *components)


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> Manifests:
    return render(KUBERNETES / "overlays" / request.param)


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
def test_every_object_fits_the_schema_of_its_kind(manifests: Manifests, version: str) -> None:
    for object in manifests.objects:
        if object["kind"] not in CUSTOM:
            kubernetes_validate.validate(object, version, strict=True)


def test_the_base_needs_no_operator(tmp_path: Path) -> None:
    assert not {object["kind"] for object in compose(tmp_path).objects} & CUSTOM


def test_every_option_is_one_that_the_server_takes(manifests: Manifests) -> None:
    known = {name.upper() for name in Settings.model_fields}
    assert set(manifests.options) <= known
    assert {variable["name"] for variable in manifests.container["env"]} <= known
    options = manifests.options | ({"DEVICE": "auto"} if manifests.options.get("DEVICE") == "cuda" else {})
    settings, warnings = load({}, options)
    assert warnings == []
    assert "args" not in manifests.container, "options are in the ConfigMap"
    assert settings.model_id


def test_every_object_is_in_the_namespace(manifests: Manifests) -> None:
    name = manifests.one("Namespace")["metadata"]["name"]
    inside = [object for object in manifests.objects if object["kind"] != "Namespace"]
    assert {object["metadata"].get("namespace") for object in inside} == {name}


def test_probes_ask_the_health_port_for_services_that_there_are(manifests: Manifests) -> None:
    container = manifests.container
    asked = {kind: container[f"{kind}Probe"]["grpc"] for kind in ("startup", "readiness", "liveness")}
    assert {probe["port"] for probe in asked.values()} == {int(manifests.options["HEALTH_PORT"])}
    services = {kind: probe.get("service", "") for kind, probe in asked.items()}
    assert services == {"startup": "", "readiness": "", "liveness": LIVENESS}
    assert set(services.values()) <= set(NAMES)


def test_ports_are_those_that_the_server_opens(manifests: Manifests) -> None:
    ports = {port["name"]: port["containerPort"] for port in manifests.container["ports"]}
    options = manifests.options
    assert ports == {
        "grpc": int(options["PORT"]),
        "health": int(options["HEALTH_PORT"]),
        "metrics": int(options["PROMETHEUS_PORT"]),
    }
    for service in manifests.all("Service"):
        assert [(port["targetPort"], port["port"]) for port in service["spec"]["ports"]] == [("grpc", ports["grpc"])]
    for monitor in manifests.all("PodMonitor"):
        assert [endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]] == ["metrics"]
    annotations = manifests.one("Deployment")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == options["PROMETHEUS_PORT"]


def test_the_pod_is_given_the_time_that_the_server_takes_to_drain(manifests: Manifests) -> None:
    settings, _ = load({}, manifests.options | {"DEVICE": "auto"})
    needed = settings.shutdown_delay + settings.shutdown_grace + 2 * CUT_SECONDS + CLOSE_SECONDS
    assert settings.shutdown_delay > 0
    assert manifests.pod["terminationGracePeriodSeconds"] > needed


def test_readiness_and_liveness_bear_a_slow_answer(manifests: Manifests) -> None:
    for kind in ("startup", "readiness", "liveness"):
        probe = manifests.container[f"{kind}Probe"]
        assert probe["timeoutSeconds"] >= 5
        assert probe["failureThreshold"] >= 3


def test_a_rollout_fails_no_sooner_than_the_startup_probe(manifests: Manifests) -> None:
    probe = manifests.container["startupProbe"]
    allowed = probe["periodSeconds"] * probe["failureThreshold"]
    assert manifests.one("Deployment")["spec"]["progressDeadlineSeconds"] > allowed


def test_connections_leave_descriptors_for_probes(manifests: Manifests) -> None:
    usual_limit, own = 1024, 200
    assert int(manifests.options["MAX_CONNECTIONS"]) <= usual_limit - own


def test_the_autoscaler_has_a_metric_that_the_server_exports(manifests: Manifests) -> None:
    autoscaler = manifests.one("HorizontalPodAutoscaler")["spec"]
    [metric] = autoscaler["metrics"]
    name = metric["pods"]["metric"]["name"]
    metrics = Metrics()
    metrics.watch_queue(lambda: 3)
    assert f"{name} 3.0" in metrics.render().decode().splitlines()
    assert autoscaler["scaleTargetRef"]["name"] == manifests.one("Deployment")["metadata"]["name"]
    [rule] = yaml.safe_load((KUBERNETES / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert rule["name"]["as"] == name
    assert rule["seriesQuery"].partition("{")[0] == name


def test_the_autoscaler_sees_the_average_of_each_pod_over_a_minute(tmp_path: Path) -> None:
    need(shutil.which("promtool"), "promtool is not installed: apt-get install prometheus")
    [rule] = yaml.safe_load((KUBERNETES / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    parts = {"Series": rule["name"]["as"], "LabelMatchers": 'namespace="tei",pod=~"a|b"', "GroupBy": "pod"}
    query = rule["metricsQuery"]
    for name, value in parts.items():
        query = query.replace(f"<<.{name}>>", value)
    case = {
        "interval": "15s",
        "input_series": [
            {"series": 'te_queue_size{namespace="tei",pod="a"}', "values": "0 0 0 0 100 0 100 0"},
            {"series": 'te_queue_size{namespace="tei",pod="b"}', "values": "8x7"},
            {"series": 'te_queue_size{namespace="other",pod="a"}', "values": "900x7"},
        ],
        "promql_expr_test": [
            {
                "expr": query,
                "eval_time": "100s",  # the samples of 45, 60, 75 and 90 seconds count
                "exp_samples": [{"labels": '{pod="a"}', "value": 50}, {"labels": '{pod="b"}', "value": 8}],
            }
        ],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"tests": [case]}))
    run = subprocess.run(["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_nobody_but_the_autoscaler_sets_replicas(manifests: Manifests) -> None:
    assert "replicas" not in manifests.one("Deployment")["spec"]
    assert manifests.one("HorizontalPodAutoscaler")["spec"]["minReplicas"] >= 2


def test_every_selector_selects_the_pods(manifests: Manifests) -> None:
    labels = manifests.labels.items()
    for service in manifests.all("Service"):
        assert service["spec"]["selector"].items() <= labels
        assert service["spec"]["selector"]
    selectors = [
        object["spec"]["selector"]
        for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor")
        for object in manifests.all(kind)
    ]
    selectors += [spread["labelSelector"] for spread in manifests.pod["topologySpreadConstraints"]]
    for selector in selectors:
        assert selector["matchLabels"].items() <= labels
        assert selector["matchLabels"]


def test_one_service_is_headless_and_one_is_not(manifests: Manifests) -> None:
    addresses = {service["metadata"]["name"]: service["spec"].get("clusterIP") for service in manifests.all("Service")}
    assert addresses == {"tei": None, "tei-headless": "None"}


def test_what_the_pod_refers_to_is_there_or_in_the_walk(manifests: Manifests) -> None:
    [source] = manifests.container["envFrom"]
    assert source["configMapRef"]["name"] == manifests.one("ConfigMap")["metadata"]["name"]
    claims = {claim["metadata"]["name"] for claim in manifests.all("PersistentVolumeClaim")}
    for volume in manifests.pod["volumes"]:
        if "persistentVolumeClaim" in volume:
            assert volume["persistentVolumeClaim"]["claimName"] in claims
        if "secret" in volume:
            assert f" {volume['secret']['secretName']} " in OPERATIONS
    for variable in manifests.container["env"]:
        assert f" {variable['valueFrom']['secretKeyRef']['name']} " in OPERATIONS


def test_files_that_options_name_are_in_a_secret(overlay: Manifests) -> None:
    files = [Path(overlay.options[name]) for name in ("TLS_CERT", "TLS_KEY", "API_KEY_FILE")]
    for file in files:
        assert "secret" in overlay.volume_at(str(file.parent))
    assert [file.name for file in files] == ["tls.crt", "tls.key", "keys"]
    assert "--from-file=keys=" in OPERATIONS


def test_all_that_is_written_is_on_volumes(manifests: Manifests) -> None:
    assert manifests.container["securityContext"]["readOnlyRootFilesystem"]
    assert manifests.volume_at("/tmp")["emptyDir"]
    models = manifests.volume_at("/data")
    assert models.keys() & {"persistentVolumeClaim", "emptyDir"}
    assert "HUGGINGFACE_HUB_CACHE=/data" in (ROOT / "Dockerfile-grpc").read_text()


def test_the_pod_is_allowed_in_a_restricted_namespace(manifests: Manifests) -> None:
    assert manifests.one("Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert manifests.pod["securityContext"]["runAsNonRoot"]
    assert manifests.pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not manifests.container["securityContext"]["allowPrivilegeEscalation"]
    assert manifests.container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_pod_gets_neither_service_links_nor_a_token(manifests: Manifests) -> None:
    assert manifests.pod["enableServiceLinks"] is False
    assert manifests.pod["automountServiceAccountToken"] is False


def test_whole_cores_are_granted_so_that_threads_and_limit_agree(overlay: Manifests) -> None:
    resources = overlay.container["resources"]
    cores = float(resources["limits"]["cpu"])
    assert cores == math.ceil(cores)
    assert resources["requests"].items() <= resources["limits"].items()


def test_only_the_gpu_overlay_asks_for_a_gpu() -> None:
    asked = {name: render(KUBERNETES / "overlays" / name) for name in OVERLAYS}
    assert {name: m.container["resources"]["limits"].get("nvidia.com/gpu") for name, m in asked.items()} == {
        "cpu": None,
        "gpu": "1",
    }
    assert {name: m.options["DEVICE"] for name, m in asked.items()} == {"cpu": "cpu", "gpu": "cuda"}


def test_a_changed_option_rolls_the_pods(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    plain, keyed = compose(tmp_path / "a"), compose(tmp_path / "b", "api-keys")
    assert plain.container["envFrom"] != keyed.container["envFrom"]


def test_models_need_no_storage_class(overlay: Manifests) -> None:
    assert overlay.all("PersistentVolumeClaim") == []
    assert "emptyDir" in overlay.volume_at("/data")


def test_shared_models_are_on_a_volume_that_all_pods_may_write(tmp_path: Path) -> None:
    manifests = compose(tmp_path, "cache-shared")
    assert manifests.volume_at("/data").keys() == {"name", "persistentVolumeClaim"}
    assert manifests.one("PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteMany"]
