/* Chains of operations on whole weights, each fused into one pass over memory. Compiled by native.py.

Quantisation rounds every operation as torch does, without contraction or reordering; exponentials and sums are equal up
to rounding. Types: 0 is fp32, 1 is bf16. */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

/* Scales, or offsets, which may be NULL. Strides in elements, 0 where a value repeats. */
typedef struct { const float *data; long row, group, element; } Scale;
typedef struct { float lowest, step, top; } Levels;                    /* top: the highest code */

/* For numbers, and NaNs that came from bf16; any other NaN could round to a number. */
static inline uint16_t number_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}

static inline uint16_t to_bf16(float value) { return value != value ? 0x7FC0 : number_to_bf16(value); }

static inline float from_bf16(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

static inline float clipped(float code, float top) { return code < 0 ? 0 : code > top ? top : code; }

/* The offset of a group; without one −0, because x − −0 and x + −0 are x, also for zeros. */
static inline float offset_of(Scale m, long row, long group) {
    return m.data ? m.data[row * m.row + group * m.group] : -0.0f;
}

static inline __attribute__((always_inline)) void quantise_one(
    const float *w, const float *s, long stride, float m, void *out, int type, long size, Levels levels, int unit) {
    for (long i = 0; i < size; i++) {
        float scale = s[i * stride], x = (w[i] - m) / scale - levels.lowest;
        float code = clipped(rintf(unit ? x : x / levels.step), levels.top);
        float value = ((unit ? code : code * levels.step) + levels.lowest) * scale + m;
        if (type) ((uint16_t *)out)[i] = to_bf16(value);
        else ((float *)out)[i] = value;
    }
}

static inline __attribute__((always_inline)) void gradients_one(
    const float *w, const float *s, long stride, float m, const void *grad, int type, float *of_w, float *of_s,
    long size, Levels levels, int unit) {
    for (long i = 0; i < size; i++) {
        float x = (w[i] - m) / s[i * stride] - levels.lowest;
        float code = rintf(unit ? x : x / levels.step), kept = clipped(code, levels.top);
        float inside = code == kept ? 1 : 0, level = (unit ? kept : kept * levels.step) + levels.lowest;
        float g = type ? from_bf16(((const uint16_t *)grad)[i]) : ((const float *)grad)[i];
        of_w[i] = g * inside;
        of_s[i] = level * g;
    }
}

/* Raises magnitudes to at least `least`, a power of two, and rounds them to fp16, or below 1024 · least to multiples of
   `least`. */
void store_scales(const float *scales, float *out, float least, long n, int threads) {
    float anchor = least * 8388608; /* 2^23 · least: floats from here on are `least` apart, so adding it rounds */
#pragma omp parallel for simd num_threads(threads)
    for (long i = 0; i < n; i++) {
        float scale = scales[i], kept = scale < 0 ? (scale > -least ? -least : scale) : scale < least ? least : scale;
        uint32_t bits;
        memcpy(&bits, &kept, 4);
        bits = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFFu; /* keeps ten bits of mantissa */
        float rounded;
        memcpy(&rounded, &bits, 4);
        rounded = rounded >= 65536 ? INFINITY : rounded <= -65536 ? -INFINITY : rounded;
        float size = kept < 0 ? -kept : kept, multiple = (size + anchor) - anchor;
        rounded = size < 1024 * least ? (kept < 0 ? -multiple : multiple) : rounded;
        out[i] = kept != kept ? kept : rounded;
    }
}

/* Loops specialised by stride, type and step, so that the compiler can vectorise them. */
#define EACH(call, stride) \
    if (unit && type) call(stride, 1, 1); else if (unit) call(stride, 0, 1); \
    else if (type) call(stride, 1, 0); else call(stride, 0, 0)

/* w and out [rows, groups, size]. */
void quantise(const float *w, Scale s, Scale m, void *out, int type, Levels levels, long rows, long groups, long size,
              int threads) {
    int unit = levels.step == 1;
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < rows; row++)
        for (long group = 0; group < groups; group++) {
            long at = (row * groups + group) * size;
            const float *scale = s.data + row * s.row + group * s.group;
            float offset = offset_of(m, row, group);
            void *to = (char *)out + at * (type ? 2 : 4);
#define CALL(stride, type, unit) quantise_one(w + at, scale, stride, offset, to, type, size, levels, unit)
            if (s.element) { EACH(CALL, 1); } else { EACH(CALL, 0); }
#undef CALL
        }
}

/* w, grad, of_w and of_s [rows, groups, size]. of_s is the scale's gradient before the sum over weights that share a
scale. */
void gradients(const float *w, const void *grad, float *of_w, float *of_s, Scale s, Scale m, int type, Levels levels,
               long rows, long groups, long size, int threads) {
    int unit = levels.step == 1;
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < rows; row++)
        for (long group = 0; group < groups; group++) {
            long at = (row * groups + group) * size;
            const float *scale = s.data + row * s.row + group * s.group, offset = offset_of(m, row, group);
            const void *from = (const char *)grad + at * (type ? 2 : 4);
#define CALL(stride, type, unit) \
    gradients_one(w + at, scale, stride, offset, from, type, of_w + at, of_s + at, size, levels, unit)
            if (s.element) { EACH(CALL, 1); } else { EACH(CALL, 0); }
#undef CALL
        }
}

static inline float level_of(float x, Levels levels) {
    return clipped(rintf((x - levels.lowest) / levels.step), levels.top) * levels.step + levels.lowest;
}

/* GPTQ: the error of each column of w [rows, size] moves on to the columns after it. root [size, size] is upper
triangular. */
void compensate(float *w, const float *s, const float *root, Levels levels, long rows, long size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 8)
    for (long row = 0; row < rows; row++) {
        float *weights = w + row * size;
        const float *scale = s + row * size;
        for (long j = 0; j < size; j++) {
            const float *next = root + j * size;
            float error = (weights[j] - level_of(weights[j] / scale[j], levels) * scale[j]) / next[j];
#pragma omp simd
            for (long k = j + 1; k < size; k++) weights[k] -= error * next[k];
        }
    }
}

/* One sweep of coordinate descent: weight after weight of a row gets the value that is best given the rounded others, and
is rounded. rounded, pull, latent and s [rows, size]; moment [size, size]; pull is −½ the gradient of the error in
`rounded`, and is only kept up to date for the weights that follow. */
void descend(const float *s, const float *moment, float *rounded, float *pull, float *latent, Levels levels, long rows,
             long size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 8)
    for (long row = 0; row < rows; row++) {
        const float *scale = s + row * size;
        float *now = rounded + row * size, *pulls = pull + row * size, *best = latent + row * size;
        for (long j = 0; j < size; j++) {
            const float *weights = moment + j * size;
            best[j] = now[j] + pulls[j] / weights[j];
            float value = level_of(best[j] / scale[j], levels) * scale[j], moved = value - now[j];
            now[j] = value;
            if (moved != 0)
#pragma omp simd
                for (long k = j + 1; k < size; k++) pulls[k] -= moved * weights[k];
        }
    }
}

/* Updates the moments m and v of n gradients with weights `first` and `second`, and writes to `moves` the steps
−m/(√v·size + eps) that go against their gradient, 0 for the others. Returns how many do. */
long move_moments(const float *grad, float *m, float *v, float *moves, float first, float second, float size, float eps,
                  long n, int threads) {
    long agreeing = 0; /* threads take longer to start than a small parameter to update */
#pragma omp parallel for simd num_threads(threads) reduction(+ : agreeing) if (n >= 65536)
    for (long i = 0; i < n; i++) {
        float g = grad[i];
        m[i] += (g - m[i]) * first;
        v[i] += (g * g - v[i]) * second;
        float move = m[i] / (sqrtf(v[i]) * size + eps);
        moves[i] = move * g <= 0 ? 0 : -move; /* a NaN reaches the parameter */
        agreeing += move * g > 0;
    }
    return agreeing;
}

#ifdef __FMA__
#define TIMES_PLUS(a, b, c) __builtin_fmaf(a, b, c)
#else
#define TIMES_PLUS(a, b, c) ((a) * (b) + (c))
#endif

/* e^x to within 2 units in the last place; inf above fp32's range, 0 below 2^−125. */
static inline float exponential(float x) {
    x = x < -87.5f ? -87.5f : x > 89 ? 89 : x;
    float n = rintf(x * 1.44269504f), r = TIMES_PLUS(n, -1.42860677e-6f, TIMES_PLUS(n, -0.693145752f, x));
    float p = TIMES_PLUS(r, 0.00139044295f, 0.00833345205f);
    p = TIMES_PLUS(p, r, 0.0416666418f);
    p = TIMES_PLUS(p, r, 0.166666667f);
    p = TIMES_PLUS(p, r, 0.5f);
    p = TIMES_PLUS(TIMES_PLUS(p, r, 1.0f), r, 1.0f);
    int32_t bits = ((int32_t)n + 126) << 23; /* of 2^(n − 1), which is 0 at the lower end: fp32 cannot hold 2^128 */
    float scale;
    memcpy(&scale, &bits, 4);
    return p * scale * 2;
}

/* Turns products with an LM head's rows into logits: (product · factor + bias) / temperature. bias may be NULL. */
typedef struct { const float *bias; float factor, temperature; } Finish;

/* Which logits of a row are wanted: index [count], where `from` is the row's first index; results outside it are 0. */
typedef struct { const int64_t *index; long from, count; } Places;

/* plain: the product itself is the logit. */
static inline __attribute__((always_inline)) float logit(const void *row, int type, int plain, long i, Finish finish) {
    float product = type ? from_bf16(((const uint16_t *)row)[i]) : ((const float *)row)[i];
    if (plain) return product;
    return (finish.bias ? product * finish.factor + finish.bias[i] : product * finish.factor) / finish.temperature;
}

static inline __attribute__((always_inline)) void put(void *row, int type, long i, float value) {
    if (type) ((uint16_t *)row)[i] = number_to_bf16(value);
    else ((float *)row)[i] = value;
}

#define STRETCH 1024 /* terms summed in fp32 before their sum is added to a double */

static inline __attribute__((always_inline)) float largest(const void *row, int type, int plain, Finish finish, long vocab) {
    float most = -INFINITY;
#pragma omp simd reduction(max : most)
    for (long i = 0; i < vocab; i++) {
        float x = logit(row, type, plain, i, finish);
        most = x > most ? x : most;
    }
    return most;
}

static inline __attribute__((always_inline)) void ask(
    const void *row, int type, int plain, Finish finish, float peak, Places places, float *chosen, long vocab) {
    for (long j = 0; j < places.count; j++) {
        long at = places.index[j] - places.from;
        chosen[j] = at >= 0 && at < vocab ? logit(row, type, plain, at, finish) - peak : 0;
    }
}

static inline __attribute__((always_inline)) void normalise_row(
    const void *row, int type, int plain, Finish finish, int first, float *peak, float *sum, Places places, float *chosen,
    long vocab) {
    if (first) *peak = largest(row, type, plain, finish, vocab);
    float most = *peak;
    double total = 0;
    for (long start = 0; start < vocab; start += STRETCH) {
        long stop = start + STRETCH < vocab ? start + STRETCH : vocab;
        float part = 0;
#pragma omp simd reduction(+ : part)
        for (long i = start; i < stop; i++) part += exponential(logit(row, type, plain, i, finish) - most);
        total += part;
    }
    *sum = total;
    ask(row, type, plain, finish, most, places, chosen, vocab);
}

static inline __attribute__((always_inline)) void softmax_row(
    void *row, int type, int plain, Finish finish, float peak, float mass, Places places, const float *taken, long vocab) {
    float values[places.count + 1];
    for (long j = 0; j < places.count; j++) {
        long at = places.index[j] - places.from;
        if (at < 0 || at >= vocab) continue;
        values[j] = exponential(logit(row, type, plain, at, finish) - peak) * mass;
        for (long k = 0; k < places.count; k++)
            if (places.index[k] == places.index[j]) values[j] += taken[k];
        values[j] *= finish.factor;
    }
    mass *= finish.factor;
#pragma omp simd
    for (long i = 0; i < vocab; i++)
        put(row, type, i, exponential(logit(row, type, plain, i, finish) - peak) * mass);
    for (long j = 0; j < places.count; j++) {
        long at = places.index[j] - places.from;
        if (at >= 0 && at < vocab) put(row, type, at, values[j]);
    }
}

/* Overwrites the row with factor · e^(logit − peak), and with 0 at the places. */
static inline __attribute__((always_inline)) void exponentiate_row(
    void *row, int type, int plain, Finish finish, int first, float *peak, float *sum, Places places, float *chosen,
    long vocab) {
    if (first) *peak = largest(row, type, plain, finish, vocab);
    float most = *peak;
    ask(row, type, plain, finish, most, places, chosen, vocab);
    double total = 0;
    for (long start = 0; start < vocab; start += STRETCH) {
        long stop = start + STRETCH < vocab ? start + STRETCH : vocab;
        float part = 0;
#pragma omp simd reduction(+ : part)
        for (long i = start; i < stop; i++) {
            float value = exponential(logit(row, type, plain, i, finish) - most);
            part += value;
            put(row, type, i, plain ? value : value * finish.factor);
        }
        total += part;
    }
    *sum = total;
    for (long j = 0; j < places.count; j++) {
        long at = places.index[j] - places.from;
        if (at >= 0 && at < vocab) put(row, type, at, 0);
    }
}

/* Loops specialised by type and form, so that the compiler can vectorise them. */
#define EACH_FORM(call) \
    if (type && plain) call(1, 1); else if (type) call(1, 0); else if (plain) call(0, 1); else call(0, 0)

static int is_plain(Finish finish) { return !finish.bias && finish.factor == 1 && finish.temperature == 1; }

/* For products [n, vocab], writes Σ e^(logit − peak) to sums [n], and logit − peak at the `count` places of each row to
chosen [n, count]. first: sets peaks [n] to the largest logits. */
void normalise(const void *products, int type, Finish finish, int first, float *peaks, float *sums, Places places,
               float *chosen, long n, long vocab, int threads) {
    int plain = is_plain(finish);
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < n; i++) {
        const void *row = (const char *)products + i * vocab * (type ? 2 : 4);
        Places here = {places.index + i * places.count, places.from, places.count};
#define CALL(type, plain) \
    normalise_row(row, type, plain, finish, first, peaks + i, sums + i, here, chosen + i * places.count, vocab)
        EACH_FORM(CALL);
#undef CALL
    }
}

/* Like `normalise`, and overwrites products with factor · e^(logit − peak), 0 at the places. */
void exponentiate(void *products, int type, Finish finish, int first, float *peaks, float *sums, Places places,
                  float *chosen, long n, long vocab, int threads) {
    int plain = is_plain(finish);
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < n; i++) {
        void *row = (char *)products + i * vocab * (type ? 2 : 4);
        Places here = {places.index + i * places.count, places.from, places.count};
#define CALL(type, plain) \
    exponentiate_row(row, type, plain, finish, first, peaks + i, sums + i, here, chosen + i * places.count, vocab)
        EACH_FORM(CALL);
#undef CALL
    }
}

/* sums [n, width] += Σ_j weights [n, count] · the row at index [n, count] of a table [height, width]. Returns how many
indices are not in the table. */
long add_rows(float *sums, const void *table, int type, Places places, const float *weights, long n, long height,
              long width, int threads) {
    long missing = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : missing)
    for (long i = 0; i < n; i++)
        for (long j = i * places.count; j < (i + 1) * places.count; j++) {
            float weight = weights[j], *sum = sums + i * width;
            long from = places.index[j] * width;
            if (places.index[j] < 0 || places.index[j] >= height)
                missing++;
            else if (type)
                for (long k = 0; k < width; k++) sum[k] += from_bf16(((const uint16_t *)table)[from + k]) * weight;
            else
                for (long k = 0; k < width; k++) sum[k] += ((const float *)table)[from + k] * weight;
        }
    return missing;
}

/* Overwrites products [n, vocab] with factor · (mass · e^(logit − peak) + taken), with peaks and mass [n]. taken
[n, count] is added at the places, and adds up where an index repeats. */
void softmax(void *products, int type, Finish finish, const float *peaks, const float *mass, Places places,
             const float *taken, long n, long vocab, int threads) {
    int plain = is_plain(finish);
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < n; i++) {
        void *row = (char *)products + i * vocab * (type ? 2 : 4);
        Places here = {places.index + i * places.count, places.from, places.count};
#define CALL(type, plain) \
    softmax_row(row, type, plain, finish, peaks[i], mass[i], here, taken + i * places.count, vocab)
        EACH_FORM(CALL);
#undef CALL
    }
}

/* y = x·r·w for x [n, width] and w [width], with r [n] = 1/√(mean x² + eps). */
void rms_norm(const float *x, const float *w, float *y, float *r, float eps, long n, long width, int threads) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < n; i++) {
        const float *row = x + i * width;
        float *out = y + i * width, sum = 0;
#pragma omp simd reduction(+ : sum)
        for (long k = 0; k < width; k++) sum += row[k] * row[k];
        float scale = r[i] = 1 / sqrtf(sum / width + eps);
        for (long k = 0; k < width; k++) out[k] = row[k] * scale * w[k];
    }
}

/* From the gradient of y, the gradients of x [n, width] and of w [width]. of_w may be NULL; otherwise sums
[threads, width] is its scratch space, filled with zeros. */
void rms_norm_back(const float *grad, const float *x, const float *w, const float *r, float *of_x, float *of_w,
                   float *sums, long n, long width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < n; i++) {
        const float *row = x + i * width, *g = grad + i * width;
        float *out = of_x + i * width, *sum = sums + omp_get_thread_num() * width, scale = r[i], dot = 0;
#pragma omp simd reduction(+ : dot)
        for (long k = 0; k < width; k++) dot += g[k] * w[k] * row[k];
        float back = dot * scale * scale / width;
#pragma omp simd
        for (long k = 0; k < width; k++) out[k] = scale * (g[k] * w[k] - row[k] * back);
        if (of_w)
#pragma omp simd
            for (long k = 0; k < width; k++) sum[k] += g[k] * row[k] * scale;
    }
    if (of_w)
        for (long k = 0; k < width; k++) {
            float sum = 0;
            for (int t = 0; t < threads; t++) sum += sums[t * width + k];
            of_w[k] = sum;
        }
}

/* For logits [n, members, groups], writes the largest logit of each group to most [n, groups], and the group's
Σ e^(logit − the row's largest) to mass [n, groups]. */
void by_group(const void *logits, int type, float *most, float *mass, long n, long members, long groups, int threads) {
    Finish finish = {NULL, 1, 1};
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < n; i++) {
        const char *table = (const char *)logits + i * members * groups * (type ? 2 : 4);
        float *high = most + i * groups, *sum = mass + i * groups, peak = -INFINITY;
        for (long g = 0; g < groups; g++) high[g] = -INFINITY, sum[g] = 0;
#define HIGHEST(type) \
    for (long m = 0; m < members; m++) { \
        const void *row = table + m * groups * (type ? 2 : 4); \
        for (long g = 0; g < groups; g++) { \
            float x = logit(row, type, 1, g, finish); \
            high[g] = high[g] > x ? high[g] : x; \
        } \
    }
        if (type) { HIGHEST(1) } else { HIGHEST(0) }
        for (long g = 0; g < groups; g++) peak = peak > high[g] ? peak : high[g];
#define EXPONENTIALS(type) \
    for (long m = 0; m < members; m++) { \
        const void *row = table + m * groups * (type ? 2 : 4); \
        for (long g = 0; g < groups; g++) sum[g] += exponential(logit(row, type, 1, g, finish) - peak); \
    }
        if (type) { EXPONENTIALS(1) } else { EXPONENTIALS(0) }
    }
}

/* Copies the logits [n, members, groups] of the groups at index [n, count] to out [n, members, count]. */
void pick_groups(const void *logits, int type, const int64_t *index, float *out, long n, long members, long groups,
                 long count, int threads) {
    Finish finish = {NULL, 1, 1};
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < n; i++)
        for (long m = 0; m < members; m++) {
            const void *row = (const char *)logits + (i * members + m) * groups * (type ? 2 : 4);
            float *to = out + (i * members + m) * count;
            for (long j = 0; j < count; j++) to[j] = logit(row, type, 1, index[i * count + j], finish);
        }
}
