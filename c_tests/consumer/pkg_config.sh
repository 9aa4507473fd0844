# Compiles main.c with the flags that pkg-config gives, for the shared and for the static library: pkg_config.sh CC PKG_CONFIG FOLDER
set -eu
cc=$1 pkg_config=$2 out=$3/pkg_config
mkdir -p "$out"
source=$(dirname "$0")/main.c
cflags=$("$pkg_config" --cflags unsloth)
libdir=$("$pkg_config" --variable=libdir unsloth)

"$cc" $cflags "$source" -o "$out/shared" $("$pkg_config" --libs unsloth)
LD_LIBRARY_PATH=$libdir "$out/shared"

# -l:libunsloth.a, since -lunsloth prefers the shared library beside it.
"$cc" $cflags "$source" -o "$out/static" $("$pkg_config" --static --libs unsloth | sed 's/-lunsloth/-l:libunsloth.a/')
"$out/static"
