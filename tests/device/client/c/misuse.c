/* Calls of edgert.h that a program gets wrong: `misuse SOCKET MODEL` prints those that were not refused as invalid. */
#define EDGERT_IMPLEMENTATION
#include "edgert.h"

static int failed;

static void refused(const char *what, int code) {
    if (code == EDGERT_INVALID) return;
    printf("%s: %s\n", what, edgert_code_name(code));
    failed = 1;
}

int main(int count, char **words) {
    static float values[4];
    const uint32_t item[] = {1, 4}, longest[] = {UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX};
    edgert_tensor input, huge;
    edgert_response response;
    edgert_error error;
    edgert_client *client = count == 3 ? edgert_connect(words[1], words[2], 30000, &error) : NULL;
    if (!client) return 2;
    refused("no shape", edgert_tensor_set(&huge, EDGERT_FP32, NULL, 2, values));
    refused("more bytes than a number holds", edgert_tensor_set(&huge, EDGERT_FP64, longest, 4, values));
    memset(&huge, 0, sizeof huge);
    huge.datatype = EDGERT_FP64;
    huge.rank = 4;
    huge.data = values;
    huge.bytes = SIZE_MAX;
    memcpy(huge.shape, longest, sizeof longest);
    refused("those bytes, by hand", edgert_infer(client, &huge, 1, NULL, &response, &error));
    (void)edgert_tensor_set(&input, EDGERT_FP32, item, 2, values);
    refused("no client", edgert_infer(NULL, &input, 1, NULL, &response, &error));
    refused("no inputs", edgert_infer(client, NULL, 1, NULL, &response, &error));
    refused("no response", edgert_infer(client, &input, 1, NULL, NULL, NULL));
    refused("no client to ping", edgert_ping(NULL, 0, NULL));
    if (edgert_infer(client, &input, 1, NULL, &response, &error)) printf("the connection ended: %s\n", error.message);
    edgert_close(client);
    return failed;
}
