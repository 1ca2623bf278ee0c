/* options.h - "--name value" for the demo workloads: one table per program, parsed and listed by --help. */
#ifndef VALVE_DEMO_OPTIONS_H
#define VALVE_DEMO_OPTIONS_H

#include <stddef.h>

enum option_kind { OPTION_NUMBER, OPTION_TEXT, OPTION_FLAG };
struct option {
	const char *name, *help;
	enum option_kind kind;
	void *value; /* double, const char * or int */
};

void options_parse(int argc, char **argv, const struct option *options, const char *about);

#endif
