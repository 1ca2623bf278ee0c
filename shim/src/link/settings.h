/* settings.h - what the environment said when the process opened nvidiactl. getenv() is not called later. */
#ifndef VALVE_SETTINGS_H
#define VALVE_SETTINGS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/un.h>

#pragma GCC visibility push(hidden)

struct valve_place_of_socket {
	struct sockaddr_un address; /* an empty path: it was too long */
	bool is_named;              /* VALVE_RUN_DIR: no other place is asked */
};

struct valve_settings {
	uint32_t wanted_role; /* VALVE_ROLE: a wish, valved decides */
	bool is_required;     /* VALVE_REQUIRE=1, of an offline process */
	uint64_t orphan_ns;   /* VALVE_ORPHAN_S: see orphan.c */
	bool names_mps;       /* CUDA_MPS_PIPE_DIRECTORY is set */
	uint32_t places;
	struct valve_place_of_socket place[3];
};
extern struct valve_settings valve_settings;

void valve_settings_read(void);
int valve_settings_socket(struct sockaddr_un *address);

#pragma GCC visibility pop
#endif
