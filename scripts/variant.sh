# Sourced: builds a variant of the extension in a copy of the tree, and leaves the installed extension unchanged.

kernel_tests=(tests/unit/test_block_codecs.py tests/unit/test_sparse_codecs.py tests/unit/test_rotation.py
  tests/unit/test_block_top_k.py tests/unit/test_wire_files.py tests/unit/test_native.py)
short_kernel_tests=(tests/unit/test_rotation.py tests/unit/test_wire_files.py tests/unit/test_block_codecs.py
  tests/unit/test_sparse_codecs.py tests/unit/test_block_top_k.py
  -k 'not any_floats and not of_anything and not past_the_caches and not 300000')

# build_variant NAME CXXFLAGS LDFLAGS: builds it in out/NAME and changes to that folder. Objects are kept for reuse.
build_variant() {
  local tree=out/$1 root=$PWD
  mkdir -p "$tree"
  rm -rf "$tree/commlib" "$tree/tests"
  cp -r --preserve=timestamps commlib csrc tests setup.py pyproject.toml MANIFEST.in README.md LICENSE "$tree"
  rm -f "$tree"/commlib/_native*
  cd "$tree"
  python=$root/.venv/bin/python
  CXXFLAGS=$2 LDFLAGS=$3 "$python" setup.py -q build_ext --inplace
}
