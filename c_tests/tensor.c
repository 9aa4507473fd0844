// Tensors, by macro and from DLPack. The structs are as dlpack.h has them (ABI version 1), written
// out so that the test needs no package.
#include "check.h"

typedef struct {
  int32_t device_type;
  int32_t device_id;
} DLDevice;

typedef struct {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} DLDataType;

typedef struct {
  void *data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape;
  int64_t *strides;
  uint64_t byte_offset;
} DLTensor;

typedef struct DLManagedTensorVersioned {
  struct {
    uint32_t major, minor;
  } version;
  void *manager_ctx;
  void (*deleter)(struct DLManagedTensorVersioned *self);
  uint64_t flags;
  DLTensor dl_tensor;
} DLManagedTensorVersioned;

enum { kDLInt = 0, kDLFloat = 2, kDLBfloat = 4, kDLBool = 6, kDLCPU = 1 };

static void by_macro(void) {
  const float weights[24] = {0};
  const size_t rows = 2;
  unsloth_tensor expected, made;
  memset(&expected, 0, sizeof expected);
  expected.data = (void *)(uintptr_t)weights;
  expected.dtype = UNSLOTH_DTYPE_F32;
  expected.rank = 3;
  expected.shape[0] = 2;
  expected.shape[1] = 3;
  expected.shape[2] = 4;
  made = UNSLOTH_TENSOR(weights, UNSLOTH_DTYPE_F32, rows, 3, rows + 2);
  CHECK(memcmp(&made, &expected, sizeof made) == 0);
  // An address as a device's.
  made = UNSLOTH_TENSOR((unsigned long long)(uintptr_t)weights, UNSLOTH_DTYPE_F32, 2, 3, 4);
  CHECK(memcmp(&made, &expected, sizeof made) == 0);
  made = UNSLOTH_TENSOR(NULL, UNSLOTH_DTYPE_I64, 7);
  CHECK(made.rank == 1 && made.shape[0] == 7 && made.shape[1] == 0);
  made = UNSLOTH_TENSOR(NULL, UNSLOTH_DTYPE_I64, 1, 2, 3, 4, 5, 6);
  CHECK(made.rank == 6 && made.shape[5] == 6);
}

// One element repeated is not a row-major tensor of as many.
static void strided(void) {
  unsloth_context *ctx = cpu_context();
  unsloth_cast_params p = UNSLOTH_CAST_PARAMS_INIT;
  const float x[6] = {1, 2, 3, 4, 5, 6};
  float out[6];
  p.x = UNSLOTH_TENSOR(x, UNSLOTH_DTYPE_F32, 6);
  p.out = UNSLOTH_TENSOR(out, UNSLOTH_DTYPE_F32, 6);
  CHECK_OK(unsloth_cast_forward(ctx, &p, NULL));
  CHECK(out[0] == 1 && out[5] == 6);
  p.x.shape[0] = p.out.shape[0] = 1;
  p.x.shape[1] = p.out.shape[1] = 6;
  p.x.rank = p.out.rank = 2;
  p.x.flags = UNSLOTH_TENSOR_STRIDED;
  // An operation that wants a contiguous last dimension sees that there is none.
  CHECK_FAILS(unsloth_cast_forward(ctx, &p, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "cast: x has stride 0 along its last dimension, allowed: 1");
  p.x.strides[1] = 1;
  CHECK_OK(unsloth_cast_forward(ctx, &p, NULL));
  CHECK_OK(unsloth_context_destroy(ctx));
}

int main(void) {
  static const struct {
    DLDataType from;
    unsloth_dtype to;
  } dtypes[] = {
      {{kDLFloat, 32, 1}, UNSLOTH_DTYPE_F32},   {{kDLFloat, 16, 1}, UNSLOTH_DTYPE_F16},
      {{kDLBfloat, 16, 1}, UNSLOTH_DTYPE_BF16}, {{kDLInt, 32, 1}, UNSLOTH_DTYPE_I32},
      {{kDLInt, 64, 1}, UNSLOTH_DTYPE_I64},     {{kDLBool, 8, 1}, UNSLOTH_DTYPE_BOOL},
  };
  float data[24];
  int64_t shape[3] = {2, 3, 2}, strides[3] = {12, 4, 1};
  DLTensor dl;
  unsloth_tensor t;
  int32_t device_type = 0, device_id = -1;

  memset(&dl, 0, sizeof dl);
  dl.data = data;
  dl.device.device_type = kDLCPU;
  dl.ndim = 3;
  dl.shape = shape;
  dl.strides = strides;
  dl.byte_offset = 8;
  for (size_t i = 0; i < COUNT(dtypes); i++) {
    dl.dtype = dtypes[i].from;
    CHECK_OK(unsloth_tensor_from_dlpack(&dl, &t, &device_type, &device_id));
    CHECK(t.dtype == dtypes[i].to && t.rank == 3);
    CHECK(t.data == (void *)(data + 2));
    CHECK(memcmp(t.shape, shape, sizeof shape) == 0);
    CHECK(memcmp(t.strides, strides, sizeof strides) == 0);
    CHECK(device_type == kDLCPU && device_id == 0);
  }

  // Without strides it is row-major.
  dl.strides = NULL;
  CHECK_OK(unsloth_tensor_from_dlpack(&dl, &t, NULL, NULL));
  for (int i = 0; i < UNSLOTH_MAX_RANK; i++) CHECK(t.strides[i] == 0 || i < 3);

  // One element repeated, as NumPy's broadcast_to makes it.
  strides[0] = strides[1] = strides[2] = 0;
  dl.strides = strides;
  CHECK_OK(unsloth_tensor_from_dlpack(&dl, &t, NULL, NULL));
  CHECK(t.flags == UNSLOTH_TENSOR_STRIDED);
  dl.strides = NULL;

  // Each result alone misaligned: nothing is written through the others.
  {
    static uint64_t room[(sizeof t + 8) / 8 + 1];
    DLManagedTensorVersioned managed;
    memset(&managed, 0, sizeof managed);
    managed.version.major = 1;
    managed.version.minor = 3;
    managed.flags = 1;
    managed.dl_tensor = dl;
    for (int wrong = 0; wrong < 4; wrong++) {
      unsloth_tensor *to = &t;
      int32_t *type = &device_type, *id = &device_id;
      uint64_t flags = 7, *flags_to = &flags;
      memset(&t, 7, sizeof t);
      device_type = device_id = 7;
      if (wrong == 0) to = (unsloth_tensor *)(void *)((char *)room + 1);
      if (wrong == 1) type = (int32_t *)(void *)((char *)room + 1);
      if (wrong == 2) id = (int32_t *)(void *)((char *)room + 1);
      if (wrong == 3) flags_to = (uint64_t *)(void *)((char *)room + 1);
      if (wrong != 3)
        CHECK_STATUS(unsloth_tensor_from_dlpack(&dl, to, type, id),
                     UNSLOTH_STATUS_INVALID_ARGUMENT);
      CHECK_STATUS(unsloth_tensor_from_dlpack_versioned(&managed, to, type, id, flags_to),
                   UNSLOTH_STATUS_INVALID_ARGUMENT);
      CHECK(device_type == 7 && device_id == 7 && flags == 7 && t.rank == 0x07070707);
      for (size_t i = 0; i < COUNT(room); i++) CHECK(room[i] == 0);
    }
    uint64_t flags = 0;
    CHECK_OK(unsloth_tensor_from_dlpack_versioned(&managed, &t, &device_type, &device_id, &flags));
    CHECK(t.rank == 3 && t.data == (void *)(data + 2) && flags == 1 && device_type == kDLCPU);
    CHECK_OK(unsloth_tensor_from_dlpack_versioned(&managed, &t, NULL, NULL, NULL));
    managed.version.major = 2;
    CHECK_FAILS(unsloth_tensor_from_dlpack_versioned(&managed, &t, NULL, NULL, NULL),
                UNSLOTH_STATUS_UNSUPPORTED,
                "tensor_from_dlpack_versioned: managed is of DLPack 2, supported: 1");
  }

  // No address wraps around.
  dl.byte_offset = UINT64_MAX - 8;
  CHECK_STATUS(unsloth_tensor_from_dlpack(&dl, &t, NULL, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT);
  dl.byte_offset = 8;

  memset(&t, 7, sizeof t);
  dl.dtype.lanes = 4;
  CHECK_STATUS(unsloth_tensor_from_dlpack(&dl, &t, NULL, NULL), UNSLOTH_STATUS_UNSUPPORTED);
  dl.dtype.lanes = 1;
  dl.ndim = 7;
  CHECK_FAILS(unsloth_tensor_from_dlpack(&dl, &t, NULL, NULL), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "tensor_from_dlpack: ndim is 7, allowed: 1 to 6");
  CHECK(t.rank == 0x07070707);
  by_macro();
  strided();
  return 0;
}
