/* Chains of operations on whole weights as one pass over memory each. See native.py, which compiles this.

Every operation is rounded as torch rounds it: no contraction, no reordering. Types: 0 is fp32, 1 is bf16. */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct { const float *data; long row, group, element; } Scale; /* strides in elements, 0 where it repeats */
typedef struct { float lowest, step, top; } Levels;                    /* top: the highest code */

static inline uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint16_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return value != value ? 0x7FC0 : rounded;
}

static inline float from_bf16(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

static inline float clipped(float code, float top) { return code < 0 ? 0 : code > top ? top : code; }

static inline __attribute__((always_inline)) void quantise_one(
    const float *w, const float *s, long stride, void *out, int type, long size, Levels levels, int unit) {
    for (long i = 0; i < size; i++) {
        float scale = s[i * stride], x = w[i] / scale - levels.lowest;
        float code = clipped(rintf(unit ? x : x / levels.step), levels.top);
        float value = ((unit ? code : code * levels.step) + levels.lowest) * scale;
        if (type) ((uint16_t *)out)[i] = to_bf16(value);
        else ((float *)out)[i] = value;
    }
}

static inline __attribute__((always_inline)) void gradients_one(
    const float *w, const float *s, long stride, const void *grad, int type, float *of_w, float *of_s, long size,
    Levels levels, int unit) {
    for (long i = 0; i < size; i++) {
        float x = w[i] / s[i * stride], shifted = x - levels.lowest;
        float code = rintf(unit ? shifted : shifted / levels.step), kept = clipped(code, levels.top);
        float inside = code == kept ? 1 : 0, level = (unit ? kept : kept * levels.step) + levels.lowest;
        float g = type ? from_bf16(((const uint16_t *)grad)[i]) : ((const float *)grad)[i];
        of_w[i] = g * inside;
        of_s[i] = (level - x * inside) * g;
    }
}

/* Loops whose stride, type and step the compiler knows, so that it can use vectors. */
#define EACH(call, stride) \
    if (unit && type) call(stride, 1, 1); else if (unit) call(stride, 0, 1); \
    else if (type) call(stride, 1, 0); else call(stride, 0, 0)

/* w [rows, groups, size]; out of its shape. */
void quantise(const float *w, Scale s, void *out, int type, Levels levels, long rows, long groups, long size, int threads) {
    int unit = levels.step == 1;
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < rows; row++)
        for (long group = 0; group < groups; group++) {
            long at = (row * groups + group) * size;
            const float *scale = s.data + row * s.row + group * s.group;
            void *to = (char *)out + at * (type ? 2 : 4);
#define CALL(stride, type, unit) quantise_one(w + at, scale, stride, to, type, size, levels, unit)
            if (s.element) { EACH(CALL, 1); } else { EACH(CALL, 0); }
#undef CALL
        }
}

/* w, grad, of_w and of_s [rows, groups, size]: of_s is the scale's gradient before it is summed over what shares one. */
void gradients(const float *w, const void *grad, float *of_w, float *of_s, Scale s, int type, Levels levels, long rows,
               long groups, long size, int threads) {
    int unit = levels.step == 1;
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < rows; row++)
        for (long group = 0; group < groups; group++) {
            long at = (row * groups + group) * size;
            const float *scale = s.data + row * s.row + group * s.group;
            const void *from = (const char *)grad + at * (type ? 2 : 4);
#define CALL(stride, type, unit) \
    gradients_one(w + at, scale, stride, from, type, of_w + at, of_s + at, size, levels, unit)
            if (s.element) { EACH(CALL, 1); } else { EACH(CALL, 0); }
#undef CALL
        }
}

/* The moments of n gradients moved on by the shares `first` and `second`, and in `moves` those of the steps
−m/(√v·size + eps) that go against their gradient, 0 in the place of the others. Returns how many do. */
long move_moments(const float *grad, float *m, float *v, float *moves, float first, float second, float size, float eps,
                  long n, int threads) {
    long agreeing = 0;
#pragma omp parallel for simd num_threads(threads) reduction(+ : agreeing)
    for (long i = 0; i < n; i++) {
        float g = grad[i];
        m[i] += (g - m[i]) * first;
        v[i] += (g * g - v[i]) * second;
        float move = m[i] / (sqrtf(v[i]) * size + eps);
        int agrees = move * g > 0;
        moves[i] = agrees ? -move : 0;
        agreeing += agrees;
    }
    return agreeing;
}
