import os

from ssd.jit import drop_stale_kernels


def test_cached_kernels_go_when_any_module_of_the_package_changes(tmp_path):
    cache = tmp_path / "__pycache__"
    module, index = tmp_path / "helper.py", cache / "kernel.nbi"
    module.write_text("x = 1\n")

    def is_dropped():
        index.touch()
        drop_stale_kernels(tmp_path)
        return not index.exists()

    drop_stale_kernels(tmp_path)
    assert not is_dropped()
    os.utime(module, (0, 0))
    assert is_dropped()
    assert not is_dropped()
    (tmp_path / "another.py").touch()
    assert is_dropped()


def test_a_folder_that_cannot_be_written_is_left_alone(tmp_path):
    (tmp_path / "__pycache__").write_text("a file in the folder's place")
    drop_stale_kernels(tmp_path)
