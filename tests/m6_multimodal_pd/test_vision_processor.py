"""Pictures and videos become the patches that the model's own processor would make of them, bit for bit."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from m1_single_request.errors import ConfigError, ModelLoadError
from m6_multimodal_pd.config import MultimodalConfig
from m6_multimodal_pd.errors import InvalidMediaError
from m6_multimodal_pd.multimodal.decode_image import Picture
from m6_multimodal_pd.multimodal.decode_video import Frames
from m6_multimodal_pd.multimodal.media_reader import MediaLoader
from m6_multimodal_pd.multimodal.patches import resize
from m6_multimodal_pd.multimodal.processor_settings import IMAGES, VIDEOS, read_settings
from m6_multimodal_pd.multimodal.vision_processor import ProcessedItem, VisionProcessor, timestamps

VISION = SimpleNamespace(patch_size=16, temporal_patch_size=2, spatial_merge_size=2)
VALUES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
SHAPE = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
BOTH = {**SHAPE, **VALUES, "processor_class": "Qwen3VLProcessor"}
IMAGE_SIZE, VIDEO_SIZE = (
    {"longest_edge": 16777216, "shortest_edge": 65536},
    {"longest_edge": 25165824, "shortest_edge": 4096},
)
IMAGE = {"size": IMAGE_SIZE, **BOTH, "image_processor_type": "Qwen2VLImageProcessorFast"}  # as in the released Qwen3-VL
VIDEO = {"size": VIDEO_SIZE, **BOTH, "video_processor_type": "Qwen3VLVideoProcessor"}


def save(directory: Path, image: Any = None, video: Any = None, both: Any = None) -> Path:
    named = {"preprocessor_config.json": image, "video_preprocessor_config.json": video, "processor_config.json": both}
    for name, content in named.items():
        if content is not None:
            (directory / name).write_text(json.dumps(content))
    return directory


def make(directory: Path, image: Any = None, video: Any = None, **config: Any) -> VisionProcessor:
    """A processor whose files have these settings in place of Qwen3-VL's."""
    save(directory, IMAGE | (image or {}), VIDEO | (video or {}))
    return VisionProcessor(*read_settings(str(directory), MultimodalConfig(**config), VISION))


def sized(low: int, high: int) -> dict[str, Any]:
    return {"size": {"shortest_edge": low, "longest_edge": high}}


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)


def clip(frames: np.ndarray, video_fps: float = 24.0) -> Frames:
    return Frames(frames, tuple(range(len(frames))), video_fps, len(frames))


def unpacked(item: ProcessedItem) -> np.ndarray:
    """The pixels [frames, height, width, 3] that an item's rows show, put back one by one."""
    grid_t, grid_h, grid_w = item.layout.grid_thw
    pixels = np.zeros((grid_t * 2, grid_h * 16, grid_w * 16, 3), np.float32)
    rows = iter(item.item.feature)
    for t in range(grid_t):
        for block_y in range(0, grid_h, 2):
            for block_x in range(0, grid_w, 2):
                for y, x in ((0, 0), (0, 1), (1, 0), (1, 1)):
                    patch = next(rows).reshape(3, 2, 16, 16).transpose(1, 2, 3, 0)
                    top, left = (block_y + y) * 16, (block_x + x) * 16
                    pixels[2 * t : 2 * t + 2, top : top + 16, left : left + 16] = patch
    return pixels


# --- images -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [(65536, 16777216), (4096, 65536), (4096, 4096)])
def test_images_are_what_transformers_makes_of_them(tmp_path: Path, limits: tuple[int, int]) -> None:
    processor = make(tmp_path, sized(*limits))
    theirs = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    sizes = [(1, 1), (1, 7), (3, 50), (3, 3), (4, 9), (16, 16), (31, 33), (32, 32), (47, 80), (48, 16), (96, 96)]
    for height, width in [*sizes, (97, 130), (200, 1), (240, 320), (333, 77), (480, 640)]:
        pixels = noise(height, width)
        made = theirs(images=[pixels], input_data_format="channels_last", return_tensors="np")
        item = processor.process(Picture(pixels))
        np.testing.assert_array_equal(item.item.feature, made["pixel_values"])
        assert item.item.feature.dtype == np.float32
        assert item.layout.grid_thw == tuple(made["image_grid_thw"][0])
        assert (item.timestamps, item.item.size) == ((), (width, height))


def test_what_the_files_leave_out_is_as_in_transformers() -> None:
    for ours, theirs in ((IMAGES, Qwen2VLImageProcessorPil), (VIDEOS, Qwen3VLVideoProcessor)):
        assert ours == {key: tuple(value) if isinstance(value := getattr(theirs, key), list) else value for key in ours}


def test_limits_of_the_configuration_stand_in_for_the_models(tmp_path: Path) -> None:
    assert make(tmp_path, max_pixels=100_000).image_layout(640, 480).num_tokens < 100
    assert make(tmp_path, min_pixels=400_000).image_layout(640, 480).num_tokens > 380
    low, high = make(tmp_path, min_pixels=4096, max_pixels=65536), make(tmp_path, sized(4096, 65536))
    assert low.image == high.image and low.options_key == high.options_key


@pytest.mark.parametrize("config", [{"min_pixels": 20_000_000}, {"max_pixels": 60_000}])
def test_limits_below_a_token_or_beside_the_model_s_are_refused(tmp_path: Path, config: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(config))}=.*65536 to 16777216"):
        make(tmp_path, **config)
    with pytest.raises(ConfigError, match="32x32"):
        make(tmp_path, min_pixels=100, max_pixels=1000)


@pytest.mark.parametrize(("width", "height"), [(201, 1), (1, 201), (6500, 32)])
def test_long_and_narrow_pictures_are_refused(tmp_path: Path, width: int, height: int) -> None:
    processor = make(tmp_path)
    for media in (Picture(np.zeros((height, width, 3), np.uint8)), clip(np.zeros((2, height, width, 3), np.uint8))):
        with pytest.raises(InvalidMediaError, match=rf"{width}x{height} is too long and narrow: .* 20[0-9]\.\d times"):
            processor.process(media)
    assert processor.image_layout(200, 1).num_tokens  # the longest that is taken


# --- videos -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_frames", "height", "width", "low", "high", "resized"),
    [
        (139, 1382, 1154, 4096, 25165824, (448, 384)),
        (262, 253, 1626, 131072, 786432, (32, 128)),
        (4, 40, 64, 131072, 786432, (160, 256)),
        (25, 60, 520, 4096, 787456, (64, 512)),  # 12 pairs of frames: half a pair is rounded to even
    ],
)
def test_all_frames_of_a_video_together_are_brought_into_the_range(
    tmp_path: Path, num_frames: int, height: int, width: int, low: int, high: int, resized: tuple[int, int]
) -> None:
    layout = make(tmp_path, video=sized(low, high)).video_layout(num_frames, width, height)
    assert layout.size == resized[::-1]
    assert layout.grid_thw == ((num_frames + 1) // 2, resized[0] // 16, resized[1] // 16)


def test_one_frame_is_no_video(tmp_path: Path) -> None:
    with pytest.raises(InvalidMediaError, match="give it as an image"):
        make(tmp_path).process(clip(noise(1, 64, 64)))


def test_every_pixel_of_a_video_is_in_its_place(tmp_path: Path) -> None:
    """Red is the row, green the column, blue the frame: whatever is swapped shows."""
    frames = np.zeros((4, 64, 96, 3), np.uint8)
    frames[..., 0] = np.arange(64)[:, None]
    frames[..., 1] = np.arange(96)
    frames[..., 2] = np.arange(4)[:, None, None]
    item = make(tmp_path, video=sized(4096, 10**6)).process(clip(frames))
    assert item.layout.grid_thw == (2, 4, 6) and item.item.feature.shape == (48, 1536)
    np.testing.assert_array_equal(np.round((unpacked(item) + 1) * 127.5).astype(np.uint8), frames)
    first = np.round((item.item.feature[0].reshape(3, 2, 16, 16) + 1) * 127.5)
    assert (first[0, 0, :, 0].tolist(), first[1, 0, 0].tolist()) == (list(range(16)), list(range(16)))
    assert (first[2, 0] == 0).all() and (first[2, 1] == 1).all()


def test_the_last_frame_of_an_odd_number_is_there_twice(tmp_path: Path) -> None:
    frames = noise(3, 64, 64)
    item = make(tmp_path, video=sized(4096, 10**6)).process(clip(frames, video_fps=10))
    again = np.round((unpacked(item) + 1) * 127.5).astype(np.uint8)
    np.testing.assert_array_equal(again, frames[[0, 1, 2, 2]])
    assert item.layout.grid_thw[0] == 2
    assert item.timestamps == pytest.approx((0.05, 0.2))


def test_frames_are_resized_in_whole_numbers() -> None:
    """A checkerboard overshoots: bicubic weights are negative, and values are clamped after each of the two passes."""
    board = np.indices((40, 24)).sum(0) % 2 * 255
    frames = np.stack([board] * 3, axis=-1).astype(np.uint8)[None]
    small = resize(frames, 64, 96)
    assert small.dtype == np.uint8 and small.shape == (1, 96, 64, 3)
    colours = torch.from_numpy(frames).permute(0, 3, 1, 2).float()
    in_floats = torch.nn.functional.interpolate(colours, size=(96, 64), mode="bicubic", antialias=True)
    assert np.abs(in_floats.round().clamp(0, 255).permute(0, 2, 3, 1).numpy() - small).max() > 1  # another filter


@pytest.mark.parametrize(
    ("indices", "video_fps", "seconds"),
    [
        ((0, 16, 31, 47, 63, 79, 94, 110, 126, 142), 30, ["0.3", "1.3", "2.4", "3.4", "4.5"]),
        ((0,), 30, ["0.0"]),
        ((0, 2, 4, 6), 25, ["0.0", "0.2"]),
        ((0, 4, 8), 1, ["2.0", "8.0"]),
    ],
)
def test_patches_were_taken_between_their_frames(
    indices: tuple[int, ...], video_fps: float, seconds: list[str]
) -> None:
    assert [f"{second:.1f}" for second in timestamps(indices, video_fps, 2)] == seconds


def test_a_video_goes_the_whole_way(tmp_path: Path) -> None:
    """Sampled as the model's file says, and timed by where the frames were."""
    processor = make(tmp_path, video=sized(4096, 10**6) | {"fps": 1, "min_frames": 2, "max_frames": 6})
    loader = MediaLoader(MultimodalConfig(), processor.video.sampling)
    media = loader.load({"type": "video", "video": noise(50, 32, 64), "video_fps": 10})
    item = processor.process(media)
    assert (len(media.pixels), item.item.size) == (5, (64, 32))
    assert item.timestamps == pytest.approx((0.6, 3.05, 4.9))


def test_a_frames_share_of_tokens_is_capped_where_the_file_says_so(tmp_path: Path) -> None:
    free = make(tmp_path).video_layout(4, 1280, 960)
    capped = make(tmp_path, video={"cap_pixels_per_frame": True, "max_video_tokens": 100}).video_layout(4, 1280, 960)
    assert free.num_tokens == 2 * 1200 and capped.num_tokens <= 2 * 100


# --- the model's files ------------------------------------------------------------------------------------------------


def test_ranges_are_read_however_the_files_have_them(tmp_path: Path) -> None:
    expected = make(tmp_path, sized(5000, 90000)).image
    rest = {key: value for key, value in IMAGE.items() if key != "size"}
    for size in (
        {"min_pixels": 5000, "max_pixels": 90000},
        {"size": {"min_pixels": 5000, "max_pixels": 90000}},
        {"size": {"shortest_edge": 1, "longest_edge": 2}, "min_pixels": 5000, "max_pixels": 90000},
    ):
        save(tmp_path, rest | size, VIDEO)
        assert VisionProcessor(*read_settings(str(tmp_path), MultimodalConfig(), VISION)).image == expected


def test_both_processors_may_stand_in_one_file(tmp_path: Path) -> None:
    """As transformers 5 saves them; it reads that file first, and so do we."""
    apart = make(tmp_path)
    both = {"image_processor": IMAGE, "video_processor": VIDEO, "processor_class": "Qwen3VLProcessor"}
    save(tmp_path, IMAGE | sized(1024, 2048), VIDEO | sized(1024, 2048), both)
    together = VisionProcessor(*read_settings(str(tmp_path), MultimodalConfig(), VISION))
    assert together.options_key == apart.options_key


def test_without_a_file_for_videos_qwen3_vls_own_settings_hold(tmp_path: Path) -> None:
    save(tmp_path, IMAGE)
    processor = VisionProcessor(*read_settings(str(tmp_path), MultimodalConfig(), VISION))
    assert (processor.video.min_pixels, processor.video.max_pixels) == (131072, 786432)
    sampling = processor.video.sampling
    assert (sampling.fps, sampling.min_frames, sampling.max_frames) == (2, 4, 768)


@pytest.mark.parametrize(
    ("image", "video", "says"),
    [
        ({"patch_size": 14}, {}, "patch_size=14 in preprocessor_config.json, but the vision tower has 16"),
        ({}, {"merge_size": 1}, "merge_size=1 in video_preprocessor_config.json"),
        ({"do_resize": False}, {}, "do_resize=False"),
        ({"resample": 2}, {}, "resample=2"),
        (sized(2000, 1000), {}, "at least 2000 and at most 1000"),
        ({}, sized(0, 1000), "shortest_edge=0"),
        ({"size": 224}, {}, "size=224"),
        ({}, {"fps": "fast"}, "fps='fast'"),
        ({}, {"min_frames": 9, "max_frames": 8}, "min_frames"),
        ({}, {"num_frames": 32}, "number of frames"),
        ({}, {"image_std": [0.5, 0.5, 0]}, "image_std"),
        ({}, {"image_mean": [0.5]}, "three numbers"),
        ({"rescale_factor": 0}, {}, "rescale_factor=0"),
    ],
)
def test_files_that_ask_for_something_else_are_refused(tmp_path: Path, image: Any, video: Any, says: str) -> None:
    with pytest.raises(ModelLoadError, match=says):
        make(tmp_path, image, video)


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"image_processor": 3}'])
def test_broken_files_are_refused(tmp_path: Path, content: str) -> None:
    save(tmp_path, IMAGE, VIDEO)
    names = ("processor_config.json",) if "image" in content else ("processor_config.json", "preprocessor_config.json")
    for name in names:
        (tmp_path / name).write_text(content)
        with pytest.raises(ModelLoadError, match=name):
            VisionProcessor(*read_settings(str(tmp_path), MultimodalConfig(), VISION))
        (tmp_path / name).unlink()
        save(tmp_path, IMAGE, VIDEO)


def test_a_directory_without_processor_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no preprocessor_config\.json"):
        VisionProcessor(*read_settings(str(tmp_path), MultimodalConfig(), VISION))


def test_the_key_of_the_options_changes_with_whatever_changes_features(tmp_path: Path) -> None:
    half = {"image_std": [0.5, 0.5, 0.25]}
    changes = [({}, {}), (half, {}), ({}, half), (sized(4096, 65536), {}), ({}, sized(4096, 65536))]
    changes += [({}, {"cap_pixels_per_frame": True}), ({"rescale_factor": 1 / 256}, {})]
    keys = {make(tmp_path, image, video).options_key for image, video in changes}
    assert len(keys) == len(changes)
    assert make(tmp_path).options_key in keys
