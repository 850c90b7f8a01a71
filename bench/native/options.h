// The command line of a native benchmark: whole numbers by name.
#pragma once
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>

namespace glm53::bench {

// Reads "--name value" pairs into `options`; std::invalid_argument for a name that is not there or has no value.
inline void read_options(int argc, char** argv, std::initializer_list<std::pair<const char*, int*>> options) {
    for (int i = 1; i < argc; ++i) {
        bool known = false;
        for (const auto& [name, value] : options) {
            if (std::strcmp(argv[i], name) != 0) continue;
            if (i + 1 == argc) throw std::invalid_argument(std::string(name) + " needs a value");
            *value = std::atoi(argv[++i]);
            known = true;
            break;
        }
        if (!known) throw std::invalid_argument(std::string("unknown option ") + argv[i]);
    }
}

}  // namespace glm53::bench
