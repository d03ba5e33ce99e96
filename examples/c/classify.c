/* Send one request to the daemon on this machine, from C.
 *
 *   cc -std=c99 -O2 -I"$(python3 -c 'import edgert; print(edgert.include_dir())')" classify.c -o classify
 *   ./classify digits                  an input of zeros
 *   ./classify digits image.f32        one item, as raw values in native byte order
 *   ./classify digits image.f32 /run/edgert.sock
 */
#define EDGERT_IMPLEMENTATION
#include "edgert.h"

#include <inttypes.h>

enum { VALUES_SHOWN_MAX = 10 };

/* One item of the model's first input; an axis of variable length gets the length 1. */
static int one_item(const edgert_spec *spec, edgert_tensor *input) {
    uint32_t shape[EDGERT_RANK_MAX];
    int i;
    for (i = 0; i < spec->rank; i++) shape[i] = spec->shape[i] < 0 ? 1 : (uint32_t)spec->shape[i];
    return edgert_tensor_set(input, spec->datatype, shape, spec->rank, NULL);
}

/* Return the bytes of `path`, or zeros if it is NULL; the caller frees them. */
static void *read_input(const char *path, size_t bytes) {
    void *data = calloc(1, bytes + 1); /* one more, to see a file that is too long */
    FILE *file = path && data ? fopen(path, "rb") : NULL;
    size_t count = file ? fread(data, 1, bytes + 1, file) : 0;
    if (file) (void)fclose(file);
    if (data && (!path || count == bytes)) return data;
    fprintf(stderr, "error: %s must be a file of exactly %lu bytes\n", path ? path : "the input", (unsigned long)bytes);
    free(data);
    return NULL;
}

static double value_of(const edgert_tensor *tensor, size_t i) {
    switch (tensor->datatype) {
    case EDGERT_FP32: return (double)((const float *)tensor->data)[i];
    case EDGERT_FP64: return ((const double *)tensor->data)[i];
    case EDGERT_INT64: return (double)((const int64_t *)tensor->data)[i];
    case EDGERT_INT32: return ((const int32_t *)tensor->data)[i];
    case EDGERT_INT8: return ((const int8_t *)tensor->data)[i];
    case EDGERT_BOOL:
    case EDGERT_UINT8: return ((const uint8_t *)tensor->data)[i];
    default: return 0.0; /* other types print as 0 */
    }
}

static void print_output(const edgert_tensor *output, const edgert_model *model) {
    size_t count = output->bytes / edgert_datatype_bytes(output->datatype), i;
    int k;
    printf("%s %s [", output->name, edgert_datatype_name(output->datatype));
    for (k = 0; k < output->rank; k++) printf("%s%" PRIu32, k ? ", " : "", output->shape[k]);
    printf("]:");
    for (i = 0; i < count && i < VALUES_SHOWN_MAX; i++) {
        double value = value_of(output, i);
        printf(" %g", value);
        /* <name>_classes holds the numbers of the most likely classes. */
        if (output->datatype == EDGERT_INT64 && value >= 0 && value < (double)model->label_count)
            printf(" (%s)", model->labels[(size_t)value]);
    }
    printf("%s\n", count > VALUES_SHOWN_MAX ? " ..." : "");
}

int main(int argc, char **argv) {
    edgert_error error;
    edgert_client *client;
    const edgert_model *model;
    edgert_response response;
    edgert_tensor input;
    void *data = NULL;
    size_t i;
    int code;
    if (argc < 2 || argc > 4) {
        fprintf(stderr, "usage: %s MODEL [FILE [SOCKET]]\n", argv[0]);
        return 2;
    }
    client = edgert_connect(argc > 3 ? argv[3] : NULL, argv[1], 5000, &error);
    if (!client) {
        fprintf(stderr, "error: %s (%s)\n", error.message, edgert_code_name(error.code));
        return 1;
    }
    model = edgert_describe(client);
    code = model->input_count == 1 ? one_item(model->inputs, &input) : EDGERT_INVALID;
    if (code) fprintf(stderr, "error: this example asks models with one input\n");
    else if (!(input.data = data = read_input(argc > 2 ? argv[2] : NULL, input.bytes))) code = EDGERT_INVALID;
    else if ((code = edgert_infer(client, &input, 1, NULL, &response, &error)) != EDGERT_OK)
        fprintf(stderr, "error: %s (%s)\n", error.message, edgert_code_name(code));
    else
        for (i = 0; i < response.output_count; i++) print_output(&response.outputs[i], edgert_describe(client));
    free(data);
    edgert_close(client);
    return code ? 1 : 0;
}
