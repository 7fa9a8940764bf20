import ast
import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ir.steps import make_mlp, make_workload, spec
from traincast.ir import Phase, ProgramBuilder, Signature, Workload
from traincast.ir.export_traces import export_chakra_et, export_pytorch_et
from traincast.utils.errors import TraincastError

ATTRIBUTES = [
    ("rf_id", "uint64"), ("fw_parent", "uint64"), ("seq_id", "int64"), ("scope", "uint64"), ("tid", "uint64"),
    ("fw_tid", "uint64"), ("op_schema", "string"), ("kernel_backend", "string"), ("kernel_file", "string"),
    ("tensor_range", "string"),
]  # fmt: skip


def exported(workload: Workload, tmp_path: Path, rank: int = 0) -> dict:
    export_pytorch_et(workload, rank, tmp_path / "et.json")
    return json.loads((tmp_path / "et.json").read_text())


def attributes(node: dict) -> dict:
    return {item["name"]: item["value"] for item in node["attrs"]}


def test_nodes_form_the_tree_of_process_threads_scopes_and_ops(tmp_path: Path) -> None:
    nodes = exported(make_workload(), tmp_path)["nodes"]
    name = {node["id"]: node["name"] for node in nodes}
    called = [(node["name"], name[node["ctrl_deps"]]) for node in nodes[1:]]
    thread = "[pytorch|profiler|execution_trace|thread]"
    engine = "autograd::engine::evaluate_function: MmBackward0"
    assert called[:6] == [
        (thread, "[pytorch|profiler|execution_trace|process]"), ("aten::to", thread), ("aten::_to_copy", "aten::to"),
        ("aten::linear", thread), ("aten::mm", "aten::linear"), ("aten::linear", thread),
    ]  # fmt: skip
    assert ("aten::sum", thread) in called  # a scope that is its only op is one node
    assert [(engine, thread), ("MmBackward0", engine), ("aten::mm", "MmBackward0")] == called[9:12]
    assert called[-1] == ("Optimizer.zero_grad#SGD.zero_grad", thread)
    assert [node["id"] for node in nodes] == sorted({node["id"] for node in nodes})
    assert nodes[0]["id"] == nodes[0]["ctrl_deps"] == 1


def test_tensors_scalars_and_lists_are_written_as_torch_writes_them(tmp_path: Path) -> None:
    b = ProgramBuilder(batch_size=1)
    b.open_scope("aten::cat", Phase.FORWARD)
    a, c = (b.add_tensor(b.add_storage(64)) for _ in range(2))
    scalars = (
        ("dim", 0), ("p", 0.5), ("low", float("-inf")), ("flag", True), ("mode", "mean"), ("none", None),
        ("size", (2, 3)),
    )  # fmt: skip
    groups = (("tensors", 2), ("bias", 0), ("index", 1))
    inputs = (spec(2, 3), spec(2, 3), spec(4, dtype="int64", device="cpu:pinned"))
    signature = Signature("aten::cat", inputs, (spec(dtype="bfloat16"),), scalars, groups, "out")
    b.add_op(signature, [a, c, a], [c])
    node = exported(Workload(name="w", programs=(b.build_program(),)), tmp_path)["nodes"][-1]
    assert node["inputs"]["values"] == [
        [[4, 5, 0, 6, 4, "cuda:0"], [6, 7, 0, 6, 4, "cuda:0"]], "<None>", [4, 5, 0, 4, 8, "cpu"],
        0, 0.5, "-inf", True, "mean", "<None>", [2, 3],
    ]  # fmt: skip
    assert node["inputs"]["types"] == [
        "GenericList[Tensor(float),Tensor(float)]", "None", "Tensor(long int)",
        "Int", "Double", "Double", "Bool", "String", "None", "GenericList[Int,Int]",
    ]  # fmt: skip
    assert node["inputs"]["shapes"] == [[[2, 3], [2, 3]], [], [4], [], [], [], [], [], [], [[], []]]
    assert node["inputs"]["strides"] == [[[3, 1], [3, 1]], [], [1], [], [], [], [], [], [], [[], []]]
    assert node["outputs"] == {
        "values": [[6, 7, 0, 1, 2, "cuda:0"]], "shapes": [[]], "types": ["Tensor(c10::BFloat16)"], "strides": [[]],
    }  # fmt: skip
    assert attributes(node)["op_schema"] == (
        "aten::cat.out(Tensor[] tensors, Tensor? bias, Tensor index, int dim, float p, float low, bool flag, "
        "str mode, Scalar? none, int[] size) -> Tensor"
    )


def test_gradients_share_the_sequence_number_of_their_forward_op(tmp_path: Path) -> None:
    nodes = exported(make_workload(), tmp_path)["nodes"]
    forward = [attributes(n)["seq_id"] for n in nodes if n["name"] == "aten::mm" and attributes(n)["tid"] == 1]
    backward = [attributes(n) for n in nodes if n["name"] == "MmBackward0"]
    assert forward == [0, 1]
    assert [item["seq_id"] for item in backward] == [1, 0]
    assert {(item["scope"], item["tid"], item["fw_tid"]) for item in backward} == {(1, 2, 1)}
    assert all(item["fw_parent"] for item in backward)


def test_a_rank_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for rank in (-1, 1):
        with pytest.raises(TraincastError, match=f"has no rank {rank}; it has ranks 0 to 0"):
            export_pytorch_et(make_workload(), rank, tmp_path / "x.json")
        with pytest.raises(TraincastError, match=f"has no rank {rank}"):
            export_chakra_et(make_workload(), rank, tmp_path / "x.et")


def test_the_structure_is_that_of_torchs_own_observer(tmp_path: Path) -> None:
    # Given a trace that torch itself writes of two layers
    torch = pytest.importorskip("torch", reason="torch is not installed")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(tmp_path / "torch.json"))
    observer.start()
    model(torch.ones(2, 4)).sum().backward()
    observer.stop()
    observer.unregister_callback()
    real = json.loads((tmp_path / "torch.json").read_text())
    # When ours is laid alongside it
    ours = exported(make_workload(), tmp_path)
    # Then both have the same keys, the same attributes of the same types, and arguments of the same form
    assert list(ours) == list(real)
    assert ours["schema"] == real["schema"]
    for trace in (ours, real):
        for node in trace["nodes"]:
            assert set(node) == {"id", "name", "ctrl_deps", "inputs", "outputs", "attrs"}
            assert [(item["name"], item["type"]) for item in node["attrs"]] == ATTRIBUTES
            for side in (node["inputs"], node["outputs"]):
                assert list(side) == ["values", "shapes", "types", "strides"]
                assert len({len(column) for column in side.values()}) == 1
                for kind, value in zip(side["types"], side["values"], strict=True):
                    if kind.startswith("Tensor"):
                        assert [type(item) for item in value] == [int, int, int, int, int, str]
    roots = [{n["name"] for n in trace["nodes"] if n["name"].startswith("[")} for trace in (ours, real)]
    assert roots[0] == roots[1]
    assert {"AddmmBackward0"} <= {n["name"] for n in real["nodes"] if attributes(n)["scope"] == 1}
    engine = "autograd::engine::evaluate_function: "
    for trace, function in ((ours, "MmBackward0"), (real, "AddmmBackward0")):
        by_id = {n["id"]: n for n in trace["nodes"]}
        for node in (n for n in trace["nodes"] if n["name"] == function):
            assert by_id[node["ctrl_deps"]]["name"] == engine + function
            assert attributes(node)["fw_parent"] == node["ctrl_deps"]


# --- Chakra: a decoder of the wire format that knows nothing of the encoder ---


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        if key & 7 == 0:
            value, at = varint(data, at)
            yield key >> 3, value
        else:
            size, at = {1: (8, at), 5: (4, at)}.get(key & 7) or varint(data, at)
            assert at + size <= len(data)
            yield key >> 3, data[at : at + size]
            at += size


def messages(data: bytes) -> list[bytes]:
    at, found = 0, []
    while at < len(data):
        size, at = varint(data, at)
        assert at + size <= len(data)
        found.append(data[at : at + size])
        at += size
    return found


def packed(data: bytes) -> list[int]:
    at, values = 0, []
    while at < len(data):
        value, at = varint(data, at)
        values.append(value)
    return values


def decode_node(data: bytes) -> dict:
    node: dict = {"ctrl_deps": [], "data_deps": [], "duration": 0, "attr": {}, "io": {}}
    for number, value in fields(data):
        if number == 10:
            attribute = dict(fields(value))
            name = attribute.pop(1).decode()
            node["attr"][name] = next(iter(attribute.items()))
        elif number in (4, 5):
            node["ctrl_deps" if number == 4 else "data_deps"] = packed(value)
        elif number in (8, 9):
            node["io"][number] = {key: text.decode() for key, text in fields(value)}
        else:
            node[{1: "id", 2: "name", 3: "type", 7: "duration"}[number]] = value
    return node


def chakra(workload: Workload, tmp_path: Path, durations: list[float] | None = None) -> list[dict]:
    export_chakra_et(workload, 0, tmp_path / "step.et", durations)
    return [decode_node(item) for item in messages((tmp_path / "step.et").read_bytes())[1:]]


def test_chakra_nodes_have_the_fields_of_a_public_trace(tmp_path: Path, shared_data: Path) -> None:
    # Given a trace of Chakra's own converter, read by the decoder above
    with gzip.open(shared_data / "traces" / "chakra_samples" / "chakra_rank0.et.gz") as stream:
        real = [decode_node(item) for item in messages(stream.read())[1:]]
    ours = chakra(make_workload(), tmp_path, [1e-5] * 7)
    # Then host ops have the same attributes under the same fields of the same wire types
    real_op = next(n for n in real if n["attr"]["is_cpu_op"][1] == 1)
    for node in ours:
        assert {name: field for name, (field, _) in real_op["attr"].items()} == {
            name: field for name, (field, _) in node["attr"].items() if name != "stream"
        }
        assert node["type"] == real_op["type"] == 4
        assert set(node["io"]) == set(real_op["io"]) == {8, 9}
        assert all(isinstance(ast.literal_eval(text), list) for io in node["io"].values() for text in io.values())
    assert real_op["attr"]["seq_id"][1] == ours[0]["attr"]["seq_id"][1] == 2**64 - 1  # -1 in both


def test_chakra_dependencies_are_known_earlier_and_complete(tmp_path: Path) -> None:
    nodes = chakra(make_workload(), tmp_path)
    ids = [node["id"] for node in nodes]
    assert ids == sorted(set(ids))
    for node in nodes:
        assert all(dep in ids and dep < node["id"] for dep in node["ctrl_deps"] + node["data_deps"])
    by_name = Counter(node["name"].decode() for node in nodes)
    assert (by_name["aten::mm"], by_name["MmBackward0"]) == (4, 2)
    name = {node["id"]: node["name"].decode() for node in nodes}
    products = [node for node in nodes if node["name"] == b"aten::mm"]
    # The first layer reads the copied input, the second the first, the gradients what both left
    assert [[name[dep] for dep in node["data_deps"]] for node in products] == [
        ["aten::_to_copy"], ["aten::mm"], ["aten::mm"], ["aten::_to_copy"],
    ]  # fmt: skip
    update = next(node for node in nodes if node["name"] == b"aten::_foreach_add_")
    assert update["data_deps"] == [node["id"] for node in products[2:]]
    # The backward pass waits for the loss, the optimizer for the backward pass
    engine = next(node for node in nodes if node["name"].startswith(b"autograd::engine"))
    linear = [node["id"] for node in nodes if node["name"] == b"aten::linear"]
    assert engine["ctrl_deps"] == linear[-1:]  # the loss is its own scope: the host goes on once it is called
    step = next(node for node in nodes if node["name"].startswith(b"Optimizer.step"))
    assert name[max(step["ctrl_deps"])] == "MmBackward0"


def test_chakra_durations_are_microseconds(tmp_path: Path) -> None:
    seconds = [i * 1.5e-6 for i in range(7)]
    nodes = chakra(make_workload(), tmp_path, seconds)
    assert [n["duration"] for n in nodes if n["io"][8][1] != "[]"] == [round(s * 1e6) for s in seconds]
    with pytest.raises(TraincastError, match="2 durations were given for 7 ops"):
        export_chakra_et(make_workload(), 0, tmp_path / "x.et", [1.0, 2.0])


def test_chakra_knows_where_an_op_runs(tmp_path: Path) -> None:
    for node in chakra(make_workload(), tmp_path):
        on_device = "cuda:0" in node["io"][8].get(1, "")
        assert node["attr"]["is_cpu_op"] == (27, int(not (on_device or node["name"] == b"aten::_to_copy")))


@pytest.mark.parametrize(
    ("op", "kind", "collective"),
    [
        ("c10d::allreduce_", 7, 0), ("c10d::alltoall_base_", 7, 6), ("c10d::_allgather_base_", 7, 2),
        ("_c10d_functional::reduce_scatter_tensor", 7, 7), ("c10d::broadcast_", 7, 5), ("c10d::send", 5, None),
        ("c10d::recv_", 6, None), ("_c10d_functional::wait_tensor", 4, None),
    ],
)  # fmt: skip
def test_chakra_communication_has_its_type_and_bytes(
    tmp_path: Path, op: str, kind: int, collective: int | None
) -> None:
    b = ProgramBuilder(batch_size=1)
    b.open_scope(op, Phase.BACKWARD)
    b.add_op(Signature(op, (spec(256),), ()), [b.add_tensor(b.add_storage(1024))], [])
    node = chakra(Workload(name="w", programs=(b.build_program(),)), tmp_path)[-1]
    assert node["type"] == kind
    assert node["attr"].get("comm_type") == (None if collective is None else (9, collective))
    assert node["attr"].get("comm_size") == (None if kind == 4 else (9, 1024))


def test_a_communication_chakra_cannot_name_is_refused(tmp_path: Path) -> None:
    b = ProgramBuilder(batch_size=1)
    b.open_scope("s", Phase.FORWARD)
    b.add_op(Signature("c10d::monitored_thing", (), ()), [], [])
    with pytest.raises(TraincastError, match=r"op 0 \(c10d::monitored_thing\)"):
        export_chakra_et(Workload(name="w", programs=(b.build_program(),)), 0, tmp_path / "x.et")


def test_protobuf_itself_reads_the_chakra_file(tmp_path: Path) -> None:
    # Given the messages of et_def.proto, told to protobuf's own runtime
    pytest.importorskip("google.protobuf", reason="protobuf is not installed")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, unknown_fields

    kinds = {"string": 9, "uint64": 4, "int64": 3, "bool": 8}
    schema = {
        "AttributeProto": [("name", 1, "string", 1), ("int64_val", 9, "int64", 1), ("bool_val", 27, "bool", 1),
                           ("string_val", 29, "string", 1)],
        "GlobalMetadata": [("version", 1, "string", 1), ("attr", 2, ".c.AttributeProto", 3)],
        "IOInfo": [("values", 1, "string", 1), ("shapes", 2, "string", 1), ("types", 3, "string", 1)],
        "Node": [("id", 1, "uint64", 1), ("name", 2, "string", 1), ("type", 3, "uint64", 1),
                 ("ctrl_deps", 4, "uint64", 3), ("data_deps", 5, "uint64", 3), ("start_time_micros", 6, "uint64", 1),
                 ("duration_micros", 7, "uint64", 1), ("inputs", 8, ".c.IOInfo", 1), ("outputs", 9, ".c.IOInfo", 1),
                 ("attr", 10, ".c.AttributeProto", 3)],
    }  # fmt: skip
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="c", syntax="proto3")
    for message, members in schema.items():
        described = file.message_type.add(name=message)
        for name, number, kind, label in members:
            field = described.field.add(name=name, number=number, type=kinds.get(kind, 11), label=label)
            if kind.startswith("."):
                field.type_name = kind
            if name.endswith("_val"):
                field.oneof_index = 0
        if message == "AttributeProto":
            described.oneof_decl.add(name="value")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    metadata, node = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"c.{name}")) for name in ("GlobalMetadata", "Node")
    )
    # When it parses our file
    export_chakra_et(make_workload(), 0, tmp_path / "step.et", [2e-5] * 7)
    head, *rest = messages((tmp_path / "step.et").read_bytes())
    nodes = [node.FromString(item) for item in rest]
    # Then it reads what was meant, and writes back the same bytes
    assert metadata.FromString(head).version == "0.0.4"
    assert [n.name for n in nodes][:2] == ["aten::to", "aten::_to_copy"]
    assert (nodes[1].duration_micros, list(nodes[1].ctrl_deps)) == (20, [nodes[0].id])
    assert {a.name: a.int64_val for a in nodes[0].attr}["seq_id"] == -1
    parts = [part for n in nodes for part in (n, n.inputs, n.outputs, *n.attr)]
    assert not any(len(unknown_fields.UnknownFieldSet(part)) for part in parts)
    assert [n.SerializeToString(deterministic=True) for n in nodes] == rest


def test_two_ranks_export_their_own_programs(tmp_path: Path) -> None:
    workload = Workload(name="w", programs=(make_mlp(batch=4), make_mlp(batch=4, layers=3)), ranks=(0, 1))
    counts = [
        Counter(n["name"] for n in exported(workload, tmp_path, rank)["nodes"])["aten::linear"] for rank in (0, 1)
    ]
    assert counts == [2, 3]
