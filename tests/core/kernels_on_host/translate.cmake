# cmake -DIN=x.cu -DOUT=x.cpp -P translate.cmake: the two things in our .cu files that are no C++.
file(READ "${IN}" text)
string(REGEX REPLACE "([a-z_]+)<<<([^,]+), ([^,]+), 0, [^;]*>>>\\(([^;]*)\\);"
  "glm53::test::launch(\\2, \\3, [=] { \\1(\\4); });" text "${text}")
string(REGEX REPLACE "asm volatile\\(\"mov.u64 %0, %globaltimer;\"[^;]*;" "now = glm53::test::nanoseconds();" text "${text}")
if(text MATCHES "<<<|asm volatile")
  message(FATAL_ERROR "${IN}: a launch or an instruction that translate.cmake does not know")
endif()
file(WRITE "${OUT}" "#line 1 \"${IN}\"\n${text}")
