# Compiles main.c with the flags that pkg-config gives, for the shared library, for the static one,
# and as a program without shared libraries at all: pkg_config.sh CC PKG_CONFIG FOLDER
set -eu
cc=$1 pkg_config=$2 out=$3/pkg_config
mkdir -p "$out"
source=$(dirname "$0")/main.c
cflags=$("$pkg_config" --cflags unsloth)
libdir=$("$pkg_config" --variable=libdir unsloth)

needs_library() {
  readelf -d "$1" | grep -q 'NEEDED.*libunsloth'
}

"$cc" $cflags "$source" -o "$out/shared" $("$pkg_config" --libs unsloth)
LD_LIBRARY_PATH=$libdir "$out/shared"
needs_library "$out/shared"

"$cc" $cflags "$source" -o "$out/archive" $("$pkg_config" --libs unsloth-static)
"$out/archive"
if needs_library "$out/archive"; then exit 1; fi

# Where the machine has its libraries as archives too. The linker warns of what the library may open
# at run time.
echo 'int main(void) { return 0; }' > "$out/empty.c"
if "$cc" -static "$out/empty.c" -o "$out/empty" -lm 2> /dev/null; then
  "$cc" -static $cflags "$source" -o "$out/static" $("$pkg_config" --static --libs unsloth)
  "$out/static"
  if readelf -d "$out/static" | grep -q NEEDED; then exit 1; fi
fi
